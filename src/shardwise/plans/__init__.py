"""The contract between deciding and executing: plans, programs, gradient schedules, traces."""
