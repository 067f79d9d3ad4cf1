"""Grade school mathematics: openai/gsm8k from the hub, or a local copy of it."""

from __future__ import annotations

from pathlib import Path

from posttrain.config.task import FileConf
from posttrain.errors import UserError
from posttrain.tasks import files, rewards
from posttrain.tasks.task import Data


def gsm8k(cfg: FileConf) -> Data:
    """openai/gsm8k from the hub through `datasets`, or a local file of the same columns."""
    scorers = {"correct": files.answer_reward(cfg), "format": rewards.marked_format}
    if Path(cfg.path).suffix in files.READERS:
        return Data(*files.split(cfg), scorers)
    if cfg.eval_path is not None:
        raise UserError(
            f"task.eval_path={cfg.eval_path}: {cfg.path} on the hub brings its own test split; leave it out"
        )
    # The import takes half a second, and only a run that reads from the hub needs it.
    import datasets

    try:
        loaded = datasets.load_dataset(cfg.path, "main")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"task.path={cfg.path} could not be loaded from the hub ({str(error).splitlines()[0]}). "
            "A local .jsonl, .csv or .parquet file with the same columns also works."
        ) from error
    return Data(files.rows(loaded["train"].to_list(), cfg), files.rows(loaded["test"].to_list(), cfg), scorers)
