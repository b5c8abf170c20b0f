"""What may be set, where it may be set, and the validated result."""
