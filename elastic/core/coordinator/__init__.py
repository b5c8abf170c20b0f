"""The coordinator as a pure machine that decides who trains together and when the job has ended."""
