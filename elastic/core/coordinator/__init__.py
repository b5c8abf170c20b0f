"""The coordinator as a pure machine: who trains together, and when the job has ended."""
