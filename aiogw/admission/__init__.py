"""Who may use an upstream now, who waits, and who is refused; numbers and names of upstreams, nothing else."""
