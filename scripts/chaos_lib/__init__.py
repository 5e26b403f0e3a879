"""The parts of scripts/chaos: what is planned, who answers, who asks, what is read, and what must hold at the end."""
