"""mini-swe-agent on the issue of a row: what it submits is patch.diff. Its Python is that of its own environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.models import get_model
from minisweagent.run.benchmarks.swebench import get_sb_environment

STUDENT = {"model_name": "openai/student", "cost_tracking": "ignore_errors"}
"""OPENAI_BASE_URL says where it is; how it draws is said by [sampler]."""


def main() -> None:
    task = json.loads(Path(os.environ["SLIPSTREAM_TASK"]).read_text("utf-8"))
    config = get_config_from_spec("swebench.yaml")
    there = get_sb_environment(config, task["meta"])
    agent = DefaultAgent(get_model(config=config["model"] | STUDENT), there, **config["agent"])
    patch = ""
    try:
        patch = agent.run(Path(sys.argv[1]).read_text("utf-8")).get("submission", "")
    finally:  # a limit of the gateway ends it by an error
        Path("patch.diff").write_text(patch, "utf-8")


if __name__ == "__main__":
    main()
