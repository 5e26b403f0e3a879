"""The parts of ``scripts/bench``: a stub upstream, cheap clients, the programs measured, scenarios, figures."""
