"""Self-contained HTML reports of runs, studies and plans."""
