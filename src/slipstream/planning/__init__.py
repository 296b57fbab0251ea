"""Cost measurements, and predictions of what a run would take on given devices."""
