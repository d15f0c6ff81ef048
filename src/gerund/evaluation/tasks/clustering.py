"""Clustering: do k-means clusters of embeddings agree with the labels?

Knows: files of labelled texts, which of MTEB's evaluators scores them. Does not know: models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gerund.errors import DataError
from gerund.evaluation.contender import Contender
from gerund.evaluation.labelled_task import drawn
from gerund.evaluation.mteb_runs import LocalTask, run_local, score_of
from gerund.evaluation.sets.labelled import named_files, read_labelled
from gerund.evaluation.task import LabelledTexts, Score, Settings, Side, Task

FOLDER = "clustering"
_RUNS = 10


@dataclass(frozen=True, kw_only=True)
class Clustering(Task):
    """V-measure of mini-batch k-means, as MTEB's clustering tasks compute it.

    Ten times a sample as large as the file is drawn with replacement and put into as many clusters as there
    are labels (MTEB's bootstrap, on all texts instead of 4 percent). The file is ``clustering/NAME.jsonl``.
    ``settings.limit`` is at most so many texts, drawn by the seed since files are often sorted by label.
    """

    kind: ClassVar[str] = "clustering"
    side: ClassVar[Side] = "representation"
    takes_vectors: ClassVar[bool] = True

    def run(self, contender: Contender, settings: Settings) -> Score:
        """Measure.

        Raises:
            DataError: a malformed file, or a single label.
        """
        texts = self.picture_data(settings)
        if len(set(texts.labels)) < 2:
            raise DataError(f"{self.files[0]}: every text has the label {texts.labels[0]!r}; two are needed")
        attributes = {
            "max_fraction_of_documents_to_embed": None,
            "max_documents_per_cluster": len(texts.texts),
            "n_clusters": _RUNS,
        }
        columns = {"sentences": texts.texts, "labels": texts.labels}
        local = LocalTask(self.name, "AbsTaskClustering", "Clustering", "v_measure", {"test": columns}, attributes)
        scores = run_local(local, contender, settings, self.prompt(settings))
        return score_of(scores, local.main, spread=float(scores["v_measure_std"]), runs=_RUNS, size=len(texts.texts))

    def texts(self, settings: Settings) -> list[str]:
        """Return the texts that are clustered."""
        return self.picture_data(settings).texts

    def picture_data(self, settings: Settings) -> LabelledTexts:
        """Return the texts that are clustered."""
        return drawn(read_labelled(self.files[0]), settings)


def find(folder: Path) -> list[Task]:
    """Return a task for every ``clustering/NAME.jsonl``."""
    files = named_files(folder / FOLDER)
    return [Clustering(name=f"clustering/{name}", files=(path,)) for name, path in files.items()]
