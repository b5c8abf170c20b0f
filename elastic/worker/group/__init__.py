"""What members share: the process group, and how they meet, part and come to one state."""
