"""The order of the work in time: which rollout, scoring and update starts when. Engines are seen only as protocols."""
