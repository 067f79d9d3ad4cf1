"""A copy of the metrics in wandb, from a thread of its own: whatever is wrong there, no step waits or fails."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from pathlib import Path
from typing import Any

from posttrain.config import LoggerConf, WandbMode

INIT_S, FINISH_S = 30, 30


class WandbLog(threading.Thread):
    """The only place that talks to wandb. `reason` is set when it failed; records are then dropped."""

    def __init__(self, run_dir: Path, cfg: LoggerConf, config: dict[str, Any], run_id: str | None) -> None:
        super().__init__(name="wandb", daemon=True)
        self.online = cfg.mode == WandbMode.online and os.environ.get("WANDB_MODE", "online") == "online"
        self.arguments: dict[str, Any] = {
            "project": cfg.project, "name": cfg.run_name or run_dir.name, "dir": str(run_dir),
            "config": config, "id": run_id, "resume": "allow" if run_id and self.online else None,
            "mode": None if cfg.mode == WandbMode.online else "offline",
        }  # fmt: skip
        self.records: queue.SimpleQueue[tuple[int, dict[str, float]] | int] = queue.SimpleQueue()
        self.id, self.said = run_id, False
        self.url: str | None = None
        self.reason: str | None = None

    def run(self) -> None:
        try:
            import wandb

            quiet: dict[str, Any] = dict(init_timeout=INIT_S, finish_timeout=FINISH_S, console="off", silent=True)
            wandb.setup(wandb.Settings(**quiet))
            if self.online and not wandb.login(prompt=False):
                raise PermissionError("no API key; set WANDB_API_KEY, or logger.mode=offline")
            session = wandb.init(**self.arguments, settings=wandb.Settings(**quiet))
            self.id, self.url = session.id, session.url
            while isinstance(item := self.records.get(), tuple):
                step, numbers = item
                session.log(numbers, step=step)
            session.finish(exit_code=item)
        except Exception as error:
            self.reason = self.reason or f"{type(error).__name__}: {error}"
            _teardown()

    def close(self, exit_code: int) -> None:
        """Wait for wandb to finish, within bounds."""
        self.records.put(exit_code)
        self.join(INIT_S + FINISH_S)
        if self.is_alive():
            self.reason = self.reason or f"did not finish within {INIT_S + FINISH_S} s"
            _teardown()

    def state(self) -> dict[str, Any]:
        state = {"name": "wandb", "available": not self.reason, "reason": self.reason}
        return state | {"id": self.id, "url": self.url}


def _teardown() -> None:
    """Take down a broken wandb now, within bounds; its exit hook would wait for it, or end in a traceback."""
    import wandb

    def teardown() -> None:
        with contextlib.suppress(Exception):  # what broke it is told already
            wandb.teardown(exit_code=1)

    thread = threading.Thread(target=teardown, name="wandb teardown", daemon=True)
    thread.start()
    thread.join(5)
