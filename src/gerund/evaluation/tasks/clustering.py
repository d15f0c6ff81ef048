"""Clustering: do k-means clusters of embeddings agree with the labels?

Knows: files of labelled texts, which of MTEB's evaluators scores them. Does not know: models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gerund.errors import DataError
from gerund.evaluation.labelled_task import sampled
from gerund.evaluation.mteb import LocalTask, run_local, score_of
from gerund.evaluation.sets.labelled import named_files, read_labelled
from gerund.evaluation.systems.base import Encoder, Encodes
from gerund.evaluation.task import EvaluationConfig, LabelledTexts, Score, Side, Task

FOLDER = "clustering"
_RUNS = 10


@dataclass(frozen=True, kw_only=True)
class Clustering(Task):
    """V-measure of mini-batch k-means, as MTEB's clustering tasks compute it.

    Ten times a sample as large as the file is taken with replacement and put into as many clusters as there
    are labels (MTEB's bootstrap, on all texts instead of 4 percent). The file is ``clustering/NAME.jsonl``.
    ``config.limit`` is at most so many texts, sampled by the seed since files are often sorted by label.
    """

    kind: ClassVar[str] = "clustering"
    data_folder: ClassVar[str] = FOLDER
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = Encodes

    def run(self, system: Encoder, config: EvaluationConfig) -> Score:
        """Measure.

        Raises:
            DataError: a malformed file, or a single label.
        """
        texts = self.picture_data(config)
        if len(set(texts.labels)) < 2:
            raise DataError(f"{self.files[0]}: every text has the label {texts.labels[0]!r}; two are needed")
        attributes = {
            "max_fraction_of_documents_to_embed": None,
            "max_documents_per_cluster": len(texts.texts),
            "n_clusters": _RUNS,
        }
        columns = {"sentences": texts.texts, "labels": texts.labels}
        local = LocalTask(self.name, "AbsTaskClustering", "Clustering", "v_measure", {"test": columns}, attributes)
        scores = run_local(local, system, config, self.prompt(config))
        return score_of(scores, local.main, spread=float(scores["v_measure_std"]), runs=_RUNS, size=len(texts.texts))

    def texts(self, config: EvaluationConfig) -> list[str]:
        """Return the texts that are clustered."""
        return self.picture_data(config).texts

    def picture_data(self, config: EvaluationConfig) -> LabelledTexts:
        """Return the texts that are clustered."""
        return sampled(read_labelled(self.files[0]), config)


def find(folder: Path) -> list[Task]:
    """Return a task for every ``clustering/NAME.jsonl``."""
    files = named_files(folder / FOLDER)
    return [Clustering(name=f"clustering/{name}", files=(path,)) for name, path in files.items()]
