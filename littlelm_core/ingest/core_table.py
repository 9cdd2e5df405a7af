"""CORE's 22 tasks and their 21 files: a table of facts about what others published.

URL       EVAL_BUNDLE_URL in nanochat's scripts/base_eval.py
member    the path behind eval_bundle/eval_data/ in that zip, as llm-foundry has it in
          scripts/eval/local_data/; the git ids are those of the files there
kind, shots, delimiter
          the bundle's core.yaml, in its order
v1        percent by guessing, the bundle's eval_meta_data.csv and the DCLM paper
          (arXiv 2406.11794): what .2565, .310 and .384 are measured with
v2        the same in DCLM's repository since its pull request 115 (September 2025)
"""

from __future__ import annotations

import json
from typing import NamedTuple

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
LICENCES = (
    "CORE: 21 data sets, each with its own licence (MIT, Apache-2.0, CC BY, CC BY-SA, "
    "AFL-3.0, some unstated): check before you redistribute, and never train on them"
)


class File(NamedTuple):
    """A file of tasks: where it is in the bundle and what it must be."""

    member: str
    size: int
    records: int
    git_blob_sha1: str
    sha256: str


class Task(NamedTuple):
    """A task of CORE; the baselines in percent."""

    label: str
    kind: str
    shots: int
    v1: float
    v2: float
    delimiter: str = " "
    shared_file: str = ""  # "": one of its own

    @property
    def file(self) -> str:
        """The name of its file."""
        return self.shared_file or f"{self.label}.jsonl"


FILES = {
    "hellaswag.jsonl": File(
        "language_understanding/hellaswag.jsonl", 8_258_653, 10_042,
        "448321079fdc140bd8566b16b24eda9ceacd3501",
        "52a31d32b14dff7713a705be664cbeff77eb66edcf7f8b0a5e9408633929b448",
    ),
    "jeopardy.jsonl": File(
        "world_knowledge/jeopardy_all.jsonl", 364_582, 2_117,
        "2f771918dbc8b68550df204171b14d2648b5d494",
        "187e7f270a440c63d6cf11a57459fdc7e0bce889338225e42cc88e24ee13d52e",
    ),
    "bigbench_qa_wikidata.jsonl": File(
        "world_knowledge/bigbench_qa_wikidata.jsonl", 1_639_702, 20_321,
        "5e1be72797ba082fd4f6efa42f7d759d2d23339a",
        "bb0d22727cb25beffb022c8e8c0c3e1159c8b3c7bd7284603c0d6491f8616265",
    ),
    "arc_easy.jsonl": File(
        "world_knowledge/arc_easy.jsonl", 636_665, 2_376,
        "b5fd1bf87a24246a6be67230b721541688f5c349",
        "d2d12e59543acf9a5ef6079634a72b30215e36c2fd4236fff3bc855d287b87f5",
    ),
    "arc_challenge.jsonl": File(
        "world_knowledge/arc_challenge.jsonl", 365_606, 1_172,
        "ce66b8dcfb4bac892a404a0dda8b4e8ed0f84b89",
        "1ae3aeedf1951d881cbd5c2e3a31e78a1993d251479afbe4cb413b6707244636",
    ),
    "copa.jsonl": File(
        "commonsense_reasoning/copa.jsonl", 14_627, 100,
        "b22f96e08ae9d0e97e1ae58f67b6425c77ef200a",
        "595dca44dec54c849490bd403a3e24a29e3b944065783222ebb0eb1a55298846",
    ),
    "commonsense_qa.jsonl": File(
        "commonsense_reasoning/commonsense_qa.jsonl", 258_861, 1_221,
        "f1cc16a88b05ab0934aab2ec2d02a6869e6e5520",
        "2771f63f8127c0725b1f6b0ef2cd2ef6469168ae5875fc8d276b25b4f32c8c1a",
    ),
    "piqa.jsonl": File(
        "commonsense_reasoning/piqa.jsonl", 533_992, 1_838,
        "a9992adfdefde366fe7ccff871f5aa62449a09cf",
        "d2870e73aec5154df3faf259b7700876e11608eebdf69e9d6667435673dbe4e0",
    ),
    "openbook_qa.jsonl": File(
        "commonsense_reasoning/openbook_qa.jsonl", 88_043, 500,
        "a8aff255a64cbc72a85252acf00df25a315686c2",
        "adb2e5c7f8db810ddad4d6b2bf53dcc86dcc545499f7aafcaf42a8e179476c09",
    ),
    "lambada_openai.jsonl": File(
        "language_understanding/lambada_openai.jsonl", 1_895_241, 5_153,
        "4da02dd53b9e7385871d06ab855471d77b2f7dda",
        "411bfbe5b9054346b6a19299c0242670adbefb9162efd958593cbc0290b8c9dc",
    ),
    "winograd.jsonl": File(
        "language_understanding/winograd_wsc.jsonl", 60_523, 273,
        "762fe030ac6938ecba438c47a04057247c6ab891",
        "746336c27cd2e39a554cb1b8b4869d0f1ae2577ac5bfe799842d26bca5a5bf5e",
    ),
    "winogrande.jsonl": File(
        "language_understanding/winogrande.jsonl", 312_369, 1_267,
        "316e87ae4659f0c402b0f00551fdec83ab0a0986",
        "ea1592526f3bfdd0948ed3acb1b4dfa3f83d23698917118688ee1df7f8d4b8d7",
    ),
    "bigbench_dyck_languages.jsonl": File(
        "symbolic_problem_solving/bigbench_dyck_languages.jsonl", 198_916, 1_000,
        "27a4ac2b3b18716add92f4ecd62475c4f8d77768",
        "106ba9ac7507c7ab385c5e59c49cd57aa83025abf080d9b2a2661c0d6c6dbcc5",
    ),
    "agi_eval_lsat_ar.jsonl": File(
        "symbolic_problem_solving/agi_eval_lsat_ar.jsonl", 219_517, 230,
        "d663b427ba310d3f877f09a6830198ca7c856189",
        "9ffd73480b51746c11627e56239f8b87035eb255cb92c3a58fd64e2e4b65fb56",
    ),
    "bigbench_cs_algorithms.jsonl": File(
        "symbolic_problem_solving/bigbench_cs_algorithms.jsonl", 235_435, 1_320,
        "7ecee0f270f3de8b6558da14ae02181f3d950a40",
        "8485683a8c7e7e6c9fc6ca3cc81140fd85edb27f34406a6736d1539cf7ebcb3a",
    ),
    "bigbench_operators.jsonl": File(
        "symbolic_problem_solving/bigbench_operators.jsonl", 35_375, 210,
        "a982dc4f962725c9dc4abb07d3cc333c99959290",
        "41e2964ad619c49edd97c22b2c50f922a0241255d906a754bf81a20f4f66b85f",
    ),
    "bigbench_repeat_copy_logic.jsonl": File(
        "symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl", 7_158, 32,
        "86621f10e7124ed6f3a61fb91493c1256c008f60",
        "8febd2c0080a15680cd17f92bfa30d87abcfac021e646e55d0b8ad69f0cfa767",
    ),
    "squad.jsonl": File(
        "reading_comprehension/squad.jsonl", 9_810_616, 10_570,
        "dc733b8f58ec666c53fd946198c434b819a00680",
        "41fe6c43e725c0dc9161465066932c46edc390bf4019c361c500bbc4b766a350",
    ),
    "coqa.jsonl": File(
        "reading_comprehension/coqa.jsonl", 18_588_497, 7_983,
        "028bd4e51326cc43f8394987ae47fbb271aeba9d",
        "0c2b8029776a138f755d065b9506eb8e91bbd38c44dce321a75f9987bb7875aa",
    ),
    "boolq.jsonl": File(
        "reading_comprehension/boolq.jsonl", 2_210_395, 3_270,
        "f42083a58713d00ef4600118cfdf79618c269190",
        "454ff101e614370bb1807fe7ebbda6fdb57e794b9662cc1ccae211bf1ff626c8",
    ),
    "bigbench_language_identification.jsonl": File(
        "language_understanding/bigbench_language_identification.jsonl",
        3_940_808, 10_000,
        "1f132fbbb12a67ce267b7b92b458175632c265f3",
        "80c98d8e7ab8213513d1643886229c05c40a6837353b07c19ac7bd860668954e",
    ),
}  # fmt: skip

_CHOICE, _SCHEMA, _MODELING = "multiple_choice", "schema", "language_modeling"
_ANSWER = "\nAnswer: "
TASKS = (
    Task("hellaswag_zeroshot", _CHOICE, 0, 25, 25, shared_file="hellaswag.jsonl"),
    Task("jeopardy", _MODELING, 10, 0, 0, _ANSWER),
    Task("bigbench_qa_wikidata", _MODELING, 10, 0, 0),
    Task("arc_easy", _CHOICE, 10, 25, 25, _ANSWER),
    Task("arc_challenge", _CHOICE, 10, 25, 25, _ANSWER),
    Task("copa", _CHOICE, 0, 50, 50),
    Task("commonsense_qa", _CHOICE, 10, 20, 40.3),
    Task("piqa", _CHOICE, 10, 50, 50, _ANSWER),
    Task("openbook_qa", _CHOICE, 0, 25, 25),
    Task("lambada_openai", _MODELING, 0, 0, 0),
    Task("hellaswag", _CHOICE, 10, 25, 25),
    Task("winograd", _SCHEMA, 0, 50, 50),
    Task("winogrande", _SCHEMA, 0, 50, 50),
    Task("bigbench_dyck_languages", _MODELING, 10, 0, 0),
    Task("agi_eval_lsat_ar", _CHOICE, 3, 20, 25),
    Task("bigbench_cs_algorithms", _MODELING, 10, 0, 0),
    Task("bigbench_operators", _MODELING, 10, 0, 0),
    Task("bigbench_repeat_copy_logic", _MODELING, 10, 0, 0),
    Task("squad", _MODELING, 10, 0, 0),
    Task("coqa", _MODELING, 0, 0, 0),
    Task("boolq", _CHOICE, 10, 62, 62, _ANSWER),
    Task("bigbench_language_identification", _CHOICE, 10, 9.1, 25),
)


def core_yaml() -> str:
    """Return the table of tasks, as `load_tasks` reads it."""
    lines = ["# Written by `littlelm data prepare core`; baselines in percent.", ""]
    lines += ["icl_tasks:"]
    for task in TASKS:
        file = FILES[task.file]
        lines += [
            "-",
            f"  label: {task.label}",
            f"  dataset_uri: {task.file}  # {file.member}",
            f"  git_blob_sha1: {json.dumps(file.git_blob_sha1)}",
            f"  num_examples: {file.records}",
            f"  num_fewshot: [{task.shots}]",
            f"  icl_task_type: {task.kind}",
            f"  continuation_delimiter: {json.dumps(task.delimiter)}",
            # Only another harness averages such a task over its categories.
            f"  has_categories: {json.dumps(task.label == 'jeopardy')}",
            f"  task_category: {file.member.split('/')[0].replace('_', ' ')}",
            f"  random_baseline_v1: {task.v1}",
            f"  random_baseline_v2: {task.v2}",
        ]
    return "\n".join(lines) + "\n"
