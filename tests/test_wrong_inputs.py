"""What users type, write into files and return from functions: one line says what to do, and nothing begins.

`make torture` runs these too.
"""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from ddpo_lessons.cli import main as cli
from ddpo_lessons.cli import messages
from ddpo_lessons.cli.config_file import FIELDS, FLAGS
from ddpo_lessons.config import LORA_FILE

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = {
    "empty.txt": "",
    "mixed.txt": "a red three\na fox\n",
    "latin.txt": "café",
    "cut.json": '["a cat", ',
    "broken.yaml": "num_epochs: [1\n",
    "typo.yaml": "num_epoch: 3\n",
    "old/config.json": "{",
    "old/metrics.jsonl": "",
    "photos/notes.txt": "not an image",
    "captioned/a.txt": "a red three",
    "captioned/b.txt": "a blue four\na green digit",
    "half/a.txt": "a red three",
    "foxes/a.txt": "a fox",
    "blank/a.txt": " \n",
    "pretends/a.jpg": "GIF89a, or not",
    "mine.py": """import torch
def two(images, prompts): return [0.0] * len(images)
def a_dict(images, prompts, metadata): return {"red": 1.0}
def one_more(images, prompts, metadata): return [0.0] * (len(images) + 1)
def three(images, prompts, metadata): return [0.0] * len(images), {}, {}
def infinite(images, prompts, metadata): return images.mean(dim=(1, 2, 3)).log() - float("inf")
def nothing(images, prompts, metadata): print("scored")
def label(images, prompts, metadata): return [len(entry["label"]) for entry in metadata]
def opens(images, prompts, metadata): return open("weights.bin").read()
def unpacks(images, prompts, metadata): a, b = torch.zeros(3); return a
def ends(images, prompts, metadata): raise SystemExit(0)
""",
    "raises.py": "import nowhere_installed\n",
}
IMAGES = {  # folders, and a letter for each image
    **{"photos": "a", "captioned": "ab", "half": "ab", "foxes": "a", "blank": "a"},
    **{"zoo/two": "a", "zoo/three": "a", "grids/images": "a"},
}
EXAMPLE = "ddpo-lessons train --reward colorfulness --num-epochs 20"
# The words, and what the error must hold: what is wrong, and what to do or what is right.
REFUSED: tuple[tuple[str, ...], ...] = (
    # nothing that names the run
    ("train", "train needs a choice of what to train: give --reward", EXAMPLE, "--help"),
    ("train --num-epochs 3 --output-dir new --dry-run", "train needs a choice", "--preset", EXAMPLE),
    ("preflight --num-epochs 3", "preflight needs a choice", "ddpo-lessons preflight --reward colorfulness"),
    # numbers and names
    ("train --num-epochs -3", "error: --num-epochs -3 must be at least 1"),
    ("train --mixed-precision fp8", "--mixed-precision fp8 must be one of no, bf16, fp16"),
    ("train --lr nan", "--train-learning-rate nan", "finite"),
    ("train --log-with tensorbord", "must be one of tensorboard, wandb"),
    ("train --sample-eta 0", "--sample-eta 0"),
    ("train --sample-group-size 3", "--sample-group-size 3", "divide", "--sample-batch-size or --sample-num"),
    ("train --project-kwargs [1]", "--project-kwargs [1] must be a dict"),
    ("train --train-use-8bit-adam", "pip install bitsandbytes"),
    ("train --preset edti", "--preset edti does not exist (perhaps edit): use one of zoo, digit_world, "),
    ("train --algorithm ppo", "--algorithm ppo does", "ddpo"),
    ("train --algorithm nft:beta", "--algorithm nft:beta:", "KEY=VALUE"),
    ("train --algorithm nft:bta=1", "no setting 'bta' (perhaps beta): it has beta, decay_rate"),
    ("train --model nosuchfolder", "--model nosuchfolder is neither a folder"),
    ("train --model photos --reward colorfulness", "holds no model_index.json"),
    ("train --model MODEL --prompt ''", "needs a reward: give --reward"),
    ("train --model MODEL --reward colorfulness", "give --prompts, --prompt or --images"),
    # rewards by name
    ("train --reward happiness", "--reward happiness does not exist", "jpeg_compressibility"),
    ("train --reward ''", "--reward is empty", "--help"),
    ("train --reward colorfulness=much", "--reward colorfulness=much: the weight after =", "number"),
    ("train --reward mine.py:two", "mine.py:two", "three arguments"),
    ("train --judge mine.py:gone", "mine.py:gone", "it has a_dict, ends, infinite"),
    ("train --reward raises.py:red", "raises.py", "nowhere_installed", "line 1"),
    # prompts
    (
        "train --prompts poems --reward colorfulness",
        "--prompts poems does not exist: use one of activities,",
    ),
    ("train --prompts animal --reward colorfulness", "--prompts animal does not exist (perhaps animals)"),
    ("train --prompts empty.txt", "empty.txt", "one prompt per line"),
    ("train --prompts cut.json", "cut.json", "fix it"),
    ("train --prompts latin.txt", "latin.txt is not UTF-8 text (byte 3)"),
    ("train --model tiny-sd --validation latin.txt", "latin.txt is not UTF-8 text (byte 3)"),
    ("train --validation no-file.txt", "no-file.txt is not a file"),
    ("train --prompt x --prompts animals", "--prompts cannot be combined with --prompt or --images"),
    ("train --prompt 'a {label}'", "--prompt 'a {label}'", "give --images FOLDER with class subfolders"),
    ("train --reward clip_score --prompt 'a {label}'", "--prompt 'a {label}'", "or write the word itself"),
    # images
    ("train --noise-strength 0.5", "--noise-strength needs input images: give --images too"),
    ("train --damage foggy", "--damage needs input images"),
    ("train --severity 1", "--severity needs input images"),
    ("train --images photos --damage foggy --severity 0 1", "--severity 0 must lie between 1 and 5"),
    ("train --images photos --damage fogy", "--damage fogy does not exist (perhaps foggy)"),
    ("train --preset camouflage", "--preset camouflage needs input images: give --images FOLDER"),
    ("train --images no-such-folder", "no-such-folder is not a folder"),
    ("train --images old", "old and its subfolders hold no image"),
    ("train --images broken", "broken.png"),
    ("train --images pretends --prompt a", "a.jpg", "replace"),
    ("train --images blank", "blank", "write the prompt into a.txt"),
    ("train --images photos --severity 1", "give --damage too"),
    ("train --images photos --damage wet", "noisy, blurry"),
    ("train --images photos --reward colorfulness --noise-strength 2", "--noise-strength 2.0 must lie in"),
    ("train --images photos --reward colorfulness --validation photos", "is also the training set"),
    (
        "train --images photos --reward colorfulness --validation old",
        "--validation old: old and its subfolders hold",
    ),
    ("train --images photos --preset camouflage", "class subfolders"),
    ("train --images zoo --preset corruption --reward nope", "clip_change"),
    ("train --reward ,colorfulness", "--reward ,colorfulness has a term without a name: write NAME"),
    ("train --preset edit --dry-run", "give --images FOLDER, and --prompt TEXT, or else the prompt"),
    ("train --preset edit --prompt 'a fox'", "--preset edit needs input images: give --images FOLDER"),
    ("train --preset edit --reward colorfulness", "--preset edit needs input images: give --images FOLDER"),
    ("train --preset restore", "give --images FOLDER with class subfolders"),
    ("train --reward edit", "--reward edit also looks", "give --images FOLDER, and --prompt TEXT"),
    ("train --preset edit --images photos", "the folder photos has no captions", "or give --prompt TEXT"),
    ("train --preset edit --images captioned --prompt 'a fox'", "drop the prompt"),
    ("train --preset edit --images half", "write the prompt into b.txt"),
    ("train --preset edit --images captioned --sample-group-size 0", "--sample-group-size 0 must"),
    ("train --preset edit --images captioned --sample-group-size 3 --dry-run", "--sample-group-size 3 does"),
    # files and folders of runs
    ("train --config broken.yaml", "--config broken.yaml", "YAML"),
    ("train --config typo.yaml", "--config typo.yaml", "num_epochs"),
    ("train --model tiny-sd --resume-from latest --output-dir new", "--resume-from auto starts the run"),
    ("train --resume-from nowhere", "--resume-from nowhere does not exist", "folder of a checkpoint"),
    ("train --resume-from photos --output-dir new", "--resume-from photos", "checkpoint"),
    ("train --train-lora-from nowhere", "--train-lora-from nowhere does not exist", "folder of a LoRA"),
    ("train --train-lora-from photos", f"--train-lora-from photos holds no {LORA_FILE}"),
    ("train --model tiny-sd --output-dir photos/a.png", "is a file: choose another --output-dir"),
    ("train --model tiny-sd --output-dir photos/a.png/run --dry-run", "--output-dir photos/a.png is a file"),
    (
        'train --accelerator-kwargs \'{"log_with": "wandb"}\' --reward colorfulness',
        "--accelerator-kwargs must not contain 'log_with': other",
    ),
    ("train --model tiny-sd --output-dir photos/a.png --dry-run", "is a file: choose another --output-dir"),
    (
        "train --reward colorfulness --images photos --output-dir photos",
        "would write among the images of --images photos: choose",
    ),
    (
        "train --reward colorfulness --images photos --output-dir photos/run --dry-run",
        "--output-dir photos/run would write among",
    ),
    (
        "train --reward colorfulness --images grids/images --output-dir grids",
        "would write among the images of --images grids/images",
    ),
    (
        "train --reward colorfulness --images zoo --validation photos --output-dir photos",
        "among the images of --validation photos",
    ),
    ("train --model tiny-sd --output-dir grids", "grids holds no run, but images, which a run would change"),
    ("demo --output-dir photos/a.png", "photos/a.png is a file; choose another folder"),
    ("plot", "plot needs at least one folder of a run: `ddpo-lessons plot FOLDER`"),
    ("plot photos/a.png", "photos/a.png is a file: give the folder of a run"),
    ("plot no-run", "no-run does not exist: give the folder of a run", "--output-dir"),
    # sampling
    ("sample --model MODEL --images photos/notes.txt", "1 of 1 images cannot be read: photos/notes.txt"),
    ("sample", "give --prompt, --images, or"),
    ("sample --prompt 'a {label}'", "--prompt 'a {label}'", "give --images FOLDER with class subfolders"),
    ("sample --prompt x --keep-size", "--keep-size needs input images: give --images too"),
    ("sample --prompt x --noise-strength 0.4", "--noise-strength needs input images: give --images"),
    ("sample --prompt x --count 0", "--count 0: use a number of at least 1"),
    ("sample --prompt x --guidance-scale nan", "--guidance-scale nan"),
    ("sample --prompt x --guidance-scale -3", "--guidance-scale -3.0"),
    ("sample --prompt x --output-dir photos/a.png/b", "photos/a.png is a file; choose"),
    ("sample --model MODEL --prompt x --lora photos", f"--lora photos holds no {LORA_FILE}"),
    (
        "sample --model MODEL --images no.png",
        "--images no.png does not exist: give folders or files",
    ),
    ("sample --model MODEL --images photos/a.png --noise-strength 0", "--noise-strength 0.0 must lie in"),
    ("sample --images photos/a.png --count 2", "--count cannot be combined with --images"),
    ("sample --images photos --output-dir photos", "is an input"),
    ("sample --images photos --output-dir zoo", "--overwrite"),
    ("sample --images photos/a.png zoo/two/a.png", "would both become a.png"),
    ("sample --images broken", "1 of 1 images cannot be read"),
    ("sample --run photos", "holds no config.json"),
    ("sample --run no-run", "--run no-run does not exist: give the folder of a run", "--output-dir"),
    ("sample --run photos/a.png", "--run photos/a.png is a file: give the folder of a run"),
    ("sample --prompt x --lora no-lora", "--lora no-lora does not exist: give the lora folder of a run"),
    ("sample --run photos --lora photos", LORA_FILE),
    ("sample --run old", "config.json", "damaged"),
)
WITH_MODEL: tuple[tuple[str, ...], ...] = (
    ("train --model no/model --reward colorfulness --prompt ''", "hf download"),
    (
        "train --model tiny-sd --sample-num-steps 2000",
        "error: --sample-num-steps 2000 is more than the",
        "of 1000 timesteps: take fewer",
    ),
    ("sample --prompt x --steps 2000", "error: --steps 2000 is more than the", "take fewer"),
    ("train --algorithm flow_grpo", "error: --algorithm flow_grpo needs a flow model"),
    ("train --accelerator-kwargs '{\"nope\": 1}' --reward colorfulness", "--accelerator-kwargs {'nope': 1} "),
)
NO_REWARD = "(no --reward is given, so it is the preset's)"
UNFIT: tuple[tuple[str, ...], ...] = (
    ("--images foxes", "--reward prompt_alignment: prompts[0]='a fox' names no digit", NO_REWARD),
    ("--images foxes --model tiny-zoo --reward recoloring", "no class subfolders"),
    ("--images zoo --prompt 'a {label}d fox'", "names no digit", NO_REWARD),
    ("--prompt 'a car' --model tiny-zoo", "'a car', names no animal", NO_REWARD),
    ("--prompts mixed.txt", "prompts[1]='a fox' names no digit"),
    ("--reward clip_change", "--reward clip_change also looks", "give --images FOLDER with class subfolders"),
    ("--reward clip_margin --prompts digit_world", "with their label, as those of --prompts animals"),
    ("--judge edit --model tiny-sd", "--judge edit also looks at the input image"),
    ("--validation mixed.txt --model tiny-sd", "prompts[1]='a fox' names no digit"),
)
RETURNED: tuple[tuple[str, ...], ...] = (
    ("a_dict", "reward_function", "numbers"),
    ("one_more", "(5,)", "one reward per image"),
    ("three", "reward_function", "a pair of them and a dict"),
    ("infinite", "-inf", "sample 0", "prompt", "finite"),
    ("nothing", "None", "numbers"),
    ("label", "KeyError", "'label'", "mine.py, line 8"),
    ("opens", "weights.bin", "mine.py, line 9"),
    ("unpacks", "error: too many values to unpack", "mine.py, line 10)"),
    ("ends", "your code ended the program by SystemExit(0)", "mine.py, line 11)"),
)


@pytest.fixture
def refused(here, model, monkeypatch, capsys):
    """A function that runs a command among files that are each wrong in one way, and checks its error."""
    for folder, names in IMAGES.items():
        Path(folder).mkdir(parents=True)
        for name in names:
            Image.new("RGB", (40, 30), "teal").save(f"{folder}/{name}.png")
    for name, text in TEXTS.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text, encoding="latin-1")
    (here / "broken").mkdir()
    (here / "broken" / "broken.png").write_bytes(b"\x89PNG, or not")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.invalidate_caches()

    def check(words: str, *holds: str) -> set[Path]:
        """Return what the command has written."""
        before = {*here.rglob("*")}
        assert cli.main(shlex.split(words.replace("MODEL", model))) == 2
        said = capsys.readouterr().err.replace("\r", "\n").splitlines()
        (first,) = (n for n, line in enumerate(said) if "error: " in line.lower() or "Traceback" in line)
        (error,) = re.findall(r"^error: .*(?:\n  .*)*", "\n".join(said[first:]), re.MULTILINE)
        assert [line for line in error.splitlines() if len(line) > 80 and " " in line.strip()] == []
        line = " ".join(error.split())
        assert len(line) < 700
        unquoted = re.sub(messages.QUOTED, "", line)
        assert [name for name in FLAGS | FIELDS if re.search(rf"[ (]{name}=", unquoted)] == []
        assert [part for part in holds if part not in line] == []
        return {path for path in {*here.rglob("*")} - before if "__pycache__" not in path.parts}

    yield check
    for name in ("mine", "raises"):
        sys.modules.pop(name, None)


@pytest.fixture
def no_model(monkeypatch):
    """Fail where weights are loaded for training."""
    for place in ("ddpo_lessons.cli.train.load_pipeline", "ddpo_lessons.rewards.learned.load_from_hub"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("a model is loaded"))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0])
def test_a_wrong_input_is_one_line_before_any_model_loads(row, refused):
    assert refused(*row) == set()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("dry", ["", " --dry-run"])
@pytest.mark.parametrize("row", UNFIT, ids=lambda row: row[0])
def test_a_reward_that_cannot_score_what_is_given_is_refused_before_any_model_loads(row, dry, refused):
    words, *holds = row
    assert refused(f"train {words}{dry}", *holds) == set()


@pytest.mark.parametrize("row", WITH_MODEL, ids=lambda row: row[0])
def test_what_only_the_model_tells_is_one_line_too(row, refused):
    assert refused(*row) == set()


@pytest.mark.parametrize("row", RETURNED, ids=lambda row: row[0])
def test_what_a_function_returns_or_raises_is_one_line_and_leaves_no_checkpoint(row, refused):
    name, *holds = row
    sizes = "--num-epochs 1 --sample-num-steps 3 --sample-batch-size 4 --train-batch-size 4"
    made = refused(f"train --model MODEL --prompt x {sizes} --reward mine.py:{name}", *holds)
    assert [path for path in made if path.name.startswith("checkpoint")] == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("fly", ("fly", "demo, preflight, train")),
        ("train --num-epoch 3", ("--num-epoch", "--num-epochs")),  # no abbreviations
        ("train --num-epochs", ("--num-epochs",)),
        ("train --num-epochs many", ("--num-epochs", "'many'")),
        ("train --log-prob-reduction max", ("'max'", "--log-prob-reduction", "mean", "sum")),
        ("train --project-kwargs {", ("--project-kwargs", "Expecting property name")),
        ("train --dry-run=true", ("Unrecognized options: true",)),
    ],
)
def test_what_tyro_cannot_read_ends_with_its_message_and_2(words, named, here, capsys):
    assert cli.main(words.split()) == 2
    shown = capsys.readouterr()
    assert [name for name in named if name not in shown.err] == []
    assert (shown.out, list(here.iterdir())) == ("", [])
