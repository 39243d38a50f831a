"""The review world, its models and the trainer, on random models that train in a moment."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from benchmarks.text import recipe
from ddpo_lessons.text import gpt2_reviews, grammar, language_models
from ddpo_lessons.text.language_models import (
    ActorCritic,
    SentimentReward,
    SharedTrunk,
    ValueModel,
    generate,
    load_text_models,
    read,
    read_queries,
)
from ddpo_lessons.text.text_trainer import TextPPOConfig, TextPPOTrainer, measure

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = recipe.make_tokenizer()
EVALUATION = language_models.CHECKPOINT / "evaluation.json"


def make_policy() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(recipe.make_config(TOKENIZER, width=16, layers=2)).eval()


def positive_words(texts: Any) -> torch.Tensor:
    """Reward the share of words of praise."""
    plus = {word for (word,), _ in grammar.alternatives("PLUS")}
    return torch.tensor([sum(word in plus for word in text.split()) / len(text.split()) for text in texts])


def make_trainer(queries: Any = ("the plot", "i loved the"), **changes: Any) -> TextPPOTrainer:
    settings = {"batch_size": 4, "minibatch_size": 2, "inner_epochs": 2, "max_new_tokens": 5, **changes}
    policy = make_policy()
    value = ValueModel.from_policy(policy)
    return TextPPOTrainer(TextPPOConfig(**settings), policy, value, TOKENIZER, positive_words, queries)


# ------------------------------------------------------------------------------------------------ grammar
def test_what_the_grammar_writes_parses_as_what_was_meant() -> None:
    for text, sentiment in grammar.reviews(300, "train", seed=0):
        assert grammar.parse(text) == sentiment, text


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("the plot was great .", "positive"),
        ("the plot was not great .", "negative"),
        ("the songs were never dull .", "positive"),
        ("honestly , i did not like the cast .", "negative"),
        ("the plot was great , but i hated the songs .", "mixed"),
        ("although i hated the songs , the plot was great .", "mixed"),
        ("the plot was great and i loved the songs .", "positive"),
        ("the plot was great and i hated the songs .", "mixed"),
        ("the plot was great and fresh .", None),  # one adjective a clause
        ("the plot were great .", None),
        ("the plot was great", None),
        ("the plot was great great great .", None),
        ("wonderful wonderful wonderful", None),
        ("the plot was zany .", None),
        ("", None),
        ("very " * 50, None),
    ],
)
def test_parse_by_hand(text: str, meaning: str | None) -> None:
    assert grammar.parse(text) == meaning


def test_one_wrong_word_is_seen() -> None:
    rng, words = random.Random(0), grammar.vocabulary()
    texts = [text.split() for text, _ in grammar.reviews(200, "train", seed=1)]
    shuffled = [" ".join(rng.sample(text, len(text))) for text in texts]
    assert sum(grammar.parse(text) is not None for text in shuffled) < 0.05 * len(texts)
    assert len(words) > 300


def test_train_and_test_reviews_never_meet() -> None:
    train = {text for text, _ in grammar.reviews(2000, "train", seed=0)}
    test = {text for text, _ in grammar.reviews(500, "test", seed=0)}
    assert not train & test
    assert grammar.reviews(5, "test", seed=3) == grammar.reviews(5, "test", seed=3)


def test_tokenizer_gives_a_token_a_word_and_pads_left() -> None:
    batch = TOKENIZER(["the plot", "i loved the songs ."], padding=True, return_tensors="pt")
    assert batch.attention_mask.tolist() == [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    decoded = TOKENIZER.batch_decode(batch.input_ids, skip_special_tokens=True)
    assert decoded == ["the plot", "i loved the songs ."]
    assert TOKENIZER.unk_token_id not in TOKENIZER(" ".join(grammar.vocabulary())).input_ids


# ------------------------------------------------------------------------------------------------- models
def test_padding_changes_no_log_prob_and_no_value() -> None:
    policy = make_policy()
    model = ActorCritic(policy, ValueModel.from_policy(policy))
    torch.nn.init.normal_(model.value.head.weight)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    plain = model(ids, torch.ones_like(ids))
    for before, after in ((3, 0), (0, 2), (1, 4)):
        padded = torch.nn.functional.pad(ids, (before, after), value=TOKENIZER.pad_token_id)
        mask = torch.nn.functional.pad(torch.ones_like(ids), (before, after))
        for short, long in zip(plain, model(padded, mask), strict=True):
            torch.testing.assert_close(long[:, before : before + 5], short, rtol=1e-4, atol=1e-5)


def test_a_value_model_from_the_policy_claims_nothing_at_the_start() -> None:
    values = ValueModel.from_policy(make_policy())(*torch.ones(2, 2, 4, dtype=torch.long))
    assert values.tolist() == [[0] * 4] * 2


def test_a_value_model_from_the_reward_model_says_at_the_last_token_what_that_says() -> None:
    torch.manual_seed(0)
    classifier = GPT2ForSequenceClassification(
        recipe.make_config(TOKENIZER, width=16, layers=1, num_labels=1)
    )
    reward = SentimentReward(classifier, TOKENIZER)
    texts = ["the plot was dull .", "i loved the"]
    batch = TOKENIZER(texts, padding=True, return_tensors="pt")  # on the left: the last column has the last
    values = ValueModel.from_classifier(classifier)(batch.input_ids, batch.attention_mask)
    torch.testing.assert_close(values[:, -1], reward(texts))


def test_generate_pads_after_the_end_and_repeats_with_the_seed() -> None:
    policy = make_policy()
    policy.lm_head.weight.data[TOKENIZER.eos_token_id] += 0.5  # ends more often
    batch = TOKENIZER(["the plot was", "i loved"] * 20, padding=True, return_tensors="pt")
    asked = policy, batch.input_ids, batch.attention_mask, 12
    (ids, mask), (again, _) = (generate(*asked, torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(ids, again)
    for row, attended in zip(ids[:, 3:].tolist(), mask[:, 3:].tolist(), strict=True):
        end = row.index(TOKENIZER.eos_token_id) if TOKENIZER.eos_token_id in row else len(row)
        assert all(token == TOKENIZER.pad_token_id for token in row[end + 1 :])
        assert attended == [int(place <= end) for place in range(len(row))]


def test_each_response_keeps_to_its_own_limit() -> None:
    policy = make_policy()
    policy.lm_head.weight.data[TOKENIZER.eos_token_id] -= 100 * policy.transformer.ln_f.bias.sign()
    batch = TOKENIZER(["the plot was"] * 3, padding=True, return_tensors="pt")
    limits, generator = torch.tensor([2, 5, 1]), torch.Generator().manual_seed(0)
    ids, mask = generate(policy, batch.input_ids, batch.attention_mask, limits, generator)
    assert mask[:, 3:].sum(1).tolist() == [2, 5, 1]
    assert (ids[mask == 0] == TOKENIZER.pad_token_id).all()


def test_generate_draws_from_the_distribution_that_training_sees() -> None:
    """Cache and padding change nothing: frequencies are those of the full forward pass."""
    policy = make_policy()
    policy.lm_head.weight.data.mul_(8)  # far from uniform
    batch = TOKENIZER(["the plot was", "i"], padding=True, return_tensors="pt")
    ids, mask = batch.input_ids.repeat(3000, 1), batch.attention_mask.repeat(3000, 1)
    drawn, _ = generate(policy, ids, mask, 1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = read(policy, batch.input_ids, batch.attention_mask)
    for row in range(2):
        counts = torch.bincount(drawn[row::2, -1], minlength=len(TOKENIZER)) / 3000
        torch.testing.assert_close(counts, logits[row, -1].softmax(-1), rtol=0, atol=0.03)


@pytest.mark.parametrize("labels", [1, 2])
def test_sentiment_is_one_logit_or_the_difference_of_two(labels: int) -> None:
    torch.manual_seed(0)
    config = recipe.make_config(TOKENIZER, width=16, layers=1, num_labels=labels)
    reward = SentimentReward(GPT2ForSequenceClassification(config), TOKENIZER)
    scores = reward(["the plot was dull .", "i loved the songs"])
    alone = torch.cat([reward(["the plot was dull ."]), reward(["i loved the songs"])])
    torch.testing.assert_close(scores, alone)  # padding changes nothing
    assert scores.shape == (2,)


def test_three_labels_are_no_sentiment() -> None:
    config = recipe.make_config(TOKENIZER, width=16, layers=1, num_labels=3)
    with pytest.raises(ValueError, match="this one has 3"):
        SentimentReward(GPT2ForSequenceClassification(config), TOKENIZER)


def save_models_as_on_the_hub(tmp_path: Path) -> None:
    """As gpt2-imdb (no padding token) and distilbert-imdb (two outputs, a tokenizer of its own) are built."""
    make_policy().save_pretrained(tmp_path / "policy")
    plain = PreTrainedTokenizerFast(
        tokenizer_object=recipe.make_tokenizer().backend_tokenizer, eos_token=grammar.EOS
    )
    plain.save_pretrained(tmp_path / "policy")
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        settings = json.loads((tmp_path / "policy" / name).read_text())
        settings = {key: value for key, value in settings.items() if not key.startswith("pad_token")}
        (tmp_path / "policy" / name).write_text(json.dumps(settings))
    config = DistilBertConfig(vocab_size=len(TOKENIZER), dim=16, n_layers=1, n_heads=2, hidden_dim=32)
    DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    own = recipe.make_tokenizer()
    own.model_input_names = ["input_ids", "attention_mask"]
    own.save_pretrained(tmp_path / "reward")


def save_reviews(folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    rows = [{"text": text, "label": 0} for text, _ in grammar.reviews(50, "train", seed=0)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return rows


def test_hub_models_load_through_the_same_function_from_folders(tmp_path: Path) -> None:
    save_models_as_on_the_hub(tmp_path)
    loaded = load_text_models("hub", tmp_path / "policy", tmp_path / "reward", device="cpu")
    assert loaded.tokenizer.pad_token == grammar.EOS
    assert loaded.tokenizer.padding_side == "left"
    assert loaded.reward(["the plot was dull .", "great"]).shape == (2,)
    config = TextPPOConfig(batch_size=2, minibatch_size=2, inner_epochs=1, max_new_tokens=4)
    trainer = TextPPOTrainer(
        config, loaded.policy, loaded.value, loaded.tokenizer, loaded.reward, ["the plot was"]
    )
    assert trainer.step()["policy/first_ratio_error"] < 1e-4


def test_queries_come_from_a_folder_of_reviews(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = save_reviews(tmp_path)
    queries = read_queries(TOKENIZER, tmp_path, count=14)
    assert len(queries) == 14
    assert {len(query.split()) for query in queries} <= set(range(2, 9))
    assert all(any(row["text"].startswith(query) for row in rows) for query in queries)


def test_the_gpt2_command_trains_stops_and_goes_on_with_models_from_folders(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    save_models_as_on_the_hub(tmp_path)
    save_reviews(tmp_path / "reviews")
    command = [f"--{name}={tmp_path / name}" for name in ("policy", "reward", "reviews")]
    command += ["--batch-size=4", "--minibatch-size=2", "--save-every=1"]

    def run(name: str, iterations: int) -> TextPPOTrainer:
        return gpt2_reviews.main([*command, f"--output-dir={tmp_path / name}", f"--iterations={iterations}"])

    whole = run("whole", 3)
    run("halves", 1)
    halves = run("halves", 3)
    assert [record["iteration"] for record in halves.history] == [1, 2, 3]
    assert all(4 <= record["length"] <= 16 for record in halves.history)
    assert halves.history[1]["kl_coef"] < 0.2  # the KL of an untrained policy is below its target
    for one, other in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        assert torch.equal(one, other)
    lines = (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == [record["score"] for record in whole.history]
    assert len(list((tmp_path / "halves").glob("checkpoint-*"))) == 1
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "halves" / "policy")
    assert torch.equal(saved.transformer.wte.weight, whole.model.policy.transformer.wte.weight)


# ------------------------------------------------------------------------------------------------ trainer
def test_first_ratio_is_one_whatever_the_padding() -> None:
    trainer = make_trainer(["the plot", "i", "honestly , the songs were"], batch_size=6, minibatch_size=3)
    rollout = trainer.rollout(["the plot", "i", "honestly , the songs were"])
    assert len({tuple(row) for row in rollout.attention_mask.tolist()}) > 1
    stats = trainer.train_minibatch(rollout, torch.tensor([2, 0]))  # another batch than when sampled
    assert stats["policy/ratio_error"] < 1e-5  # the largest: the mean ratio is near 1 for any two policies
    assert stats["policy/approx_kl"] < 1e-9
    assert trainer.step()["policy/first_ratio_error"] < 1e-5


def test_the_mean_ratio_is_blind_to_log_probs_of_other_places_and_the_largest_is_not() -> None:
    trainer = make_trainer(["the plot", "i loved the"])
    rollout = trainer.rollout(["the plot", "i loved the"] * 200)
    with torch.no_grad():
        trainer.model.policy.transformer.wpe.weight.copy_(trainer.model.policy.transformer.wpe.weight.flip(0))
        trainer.model.policy.transformer.wpe.weight.mul_(30)
    stats = trainer.train_minibatch(rollout, torch.arange(400))
    assert stats["policy/ratio"] == pytest.approx(1, abs=0.1)
    assert stats["policy/ratio_error"] > 0.5


def test_rollout_records_what_the_loop_would() -> None:
    trainer = make_trainer(kl_coef=0.5)
    rollout = trainer.rollout(["the plot", "i loved the"])
    for row in range(2):
        ids = rollout.input_ids[row][rollout.attention_mask[row].bool()]
        query = (2, 3)[row]
        with torch.no_grad():
            log_probs = trainer.model.policy(ids[None]).logits[0].log_softmax(-1)
        expected = [log_probs[t - 1, ids[t]].item() for t in range(query, len(ids))]
        places = rollout.targets.mask[row]
        assert rollout.targets.log_probs[row][places].tolist() == pytest.approx(expected, abs=1e-4)
    assert rollout.kl.abs().max() < 1e-6  # policy and reference are still the same
    torch.testing.assert_close(rollout.rewards.sum(1), rollout.scores)


def test_a_step_trains_policy_and_value_and_leaves_the_reference() -> None:
    trainer = make_trainer()
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    reference = [p.clone() for p in trainer.reference.parameters()]
    metrics = trainer.step()
    words = [name for name in before if "wte" in name]
    assert not any(torch.equal(trainer.model.get_parameter(name), before[name]) for name in words)
    assert not torch.equal(trainer.model.value.head.weight, before["value.head.weight"])
    assert all(torch.equal(p, q) for p, q in zip(trainer.reference.parameters(), reference, strict=True))
    assert metrics["kl"] == pytest.approx(0, abs=1e-5)
    assert trainer.step()["iteration"] == 2


def numbers(trainer: TextPPOTrainer) -> str:
    """The history without times, as text: a NaN differs from itself."""
    return json.dumps([{k: v for k, v in record.items() if "seconds" not in k} for record in trainer.history])


SHARED: dict[str, Any] = {"shared": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl_target": 0.5, "kl_horizon": 8, "kl_estimator": "full", "min_new_tokens": 2, "entropy_coef": 0.1},
        SHARED,
    ],
)
def test_a_resumed_run_equals_one_without_a_stop(changes: dict[str, Any], tmp_path: Path) -> None:
    make = make_shared_trainer if changes is SHARED else lambda: make_trainer(**changes)
    whole, first, second = (make() for _ in range(3))
    for _ in range(4):
        whole.step()
    for _ in range(2):
        first.step()
    second.resume(first.save(tmp_path))
    for _ in range(2):
        second.step()
    assert numbers(second) == numbers(whole)
    assert second.kl_coef == whole.kl_coef
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.step()
    folder = trainer.save(tmp_path)
    with pytest.raises(ValueError, match=r"kl_coef: 1\.0 there, 0\.5 here"):
        make_trainer(kl_coef=0.5).resume(folder)
    with pytest.raises(ValueError, match="queries"):
        make_trainer(["the plot"]).resume(folder)
    trained = TextPPOTrainer(  # built from the trained policy, whose copy would be another reference
        trainer.config, trainer.model.policy, trainer.model.value, TOKENIZER, positive_words, trainer.queries
    )
    with pytest.raises(ValueError, match="reference"):
        trained.resume(folder)
    with pytest.raises(ValueError, match="give one of its checkpoints, such as"):
        make_trainer().resume(tmp_path)


def make_shared_trainer() -> TextPPOTrainer:
    policy = make_policy()
    config = TextPPOConfig(batch_size=4, minibatch_size=2, inner_epochs=2, max_new_tokens=5)
    return TextPPOTrainer(
        config, policy, SharedTrunk(policy), TOKENIZER, positive_words, ["the plot", "i loved the"]
    )


def test_with_a_shared_trunk_the_value_loss_reaches_the_policy() -> None:
    trainer = make_shared_trainer()
    assert [name for name, _ in trainer.model.value.named_parameters()] == ["head.weight", "head.bias"]
    ids = torch.tensor([[5, 6, 7]])
    torch.nn.init.ones_(trainer.model.value.head.weight)
    trainer.model.value(ids, torch.ones_like(ids)).square().sum().backward()
    assert trainer.model.policy.transformer.wte.weight.grad.abs().sum() > 0


def test_limits_are_drawn_evenly_for_each_response() -> None:
    trainer = make_trainer(min_new_tokens=3, max_new_tokens=5)
    counts = Counter(trainer._limits(3000).tolist())
    assert counts.keys() == {3, 4, 5}
    assert min(counts.values()) > 900
    assert make_trainer()._limits(2).tolist() == [5, 5]


def test_the_adaptive_coefficient_prices_the_next_iteration() -> None:
    trainer = make_trainer(kl_target=0.5, kl_horizon=8)  # a gain of 4 / 8
    first, second = trainer.step(), trainer.step()
    assert first["kl_coef"] == 1.0
    assert second["kl_coef"] == pytest.approx(0.9)  # no KL yet: an error of -1, clipped to -0.2
    rollout = trainer.rollout(["the plot"])
    assert rollout.kl.abs().max() > 0
    expected = rollout.scores.sum() - trainer.kl_coef * rollout.kl.sum()
    assert rollout.rewards.sum().item() == pytest.approx(expected.item(), abs=1e-5)


def test_an_entropy_bonus_keeps_entropy_up() -> None:
    settings = {"learning_rate": 1e-2, "kl_coef": 0.0, "batch_size": 16, "minibatch_size": 8}
    plain, bonus = make_trainer(**settings), make_trainer(**settings, entropy_coef=1.0)
    for trainer in (plain, bonus):
        for _ in range(6):
            trainer.step()
    assert plain.history[0]["policy/entropy"] == pytest.approx(5.7, abs=0.2)  # near log 318
    assert bonus.history[-1]["policy/entropy"] > plain.history[-1]["policy/entropy"]


def test_a_skipped_minibatch_moves_no_weight() -> None:
    trainer = make_trainer(ratio_threshold=0.5)
    before = [p.clone() for p in trainer.model.parameters()]
    assert trainer.step()["policy/skipped"] == 1
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before, strict=True))


@pytest.mark.slow
def test_runs_repeat_with_the_seed_and_learn() -> None:
    settings = {"batch_size": 16, "minibatch_size": 8, "learning_rate": 1e-2, "kl_coef": 0.0}
    trainers = [make_trainer(**settings) for _ in range(2)]
    for trainer in trainers:
        for _ in range(12):
            trainer.step()
    scores = [[record["score"] for record in trainer.history] for trainer in trainers]
    assert scores[0] == scores[1]
    assert sum(scores[0][-3:]) > sum(scores[0][:3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minibatch_size": 3}, "minibatch_size=3"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"kl_horizon": 0}, "kl_horizon=0"),
        ({"min_new_tokens": 21}, "min_new_tokens=21 must be from 1 to max_new_tokens=20"),
        ({"min_new_tokens": 0}, "min_new_tokens=0"),
        ({"kl_estimator": "k3"}, "kl_estimator='k3' must be one of kl, abs, mse, full"),
        ({"kl_target": 0.0}, "kl_target"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextPPOConfig(**{"batch_size": 4, "minibatch_size": 2, **changes})


def test_measure_by_hand() -> None:
    texts = ["the plot was great .", "the plot was dull .", "great great great", "the plot was great ."]
    measured = measure(texts, torch.tensor([1.0, -1, 3, 1]))
    assert measured == {"score": 1.0, "parses": 0.75, "positive": 0.5, "distinct": 0.75}


# ------------------------------------------------------------------------------------------ the checkpoint
@pytest.mark.slow
def test_the_shipped_checkpoint_is_small_and_what_it_says() -> None:
    files = [path for path in language_models.CHECKPOINT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")]
    said = json.loads(EVALUATION.read_text(encoding="utf-8"))
    measured = recipe.evaluate(load_text_models(), count=150)
    assert measured["reward model: accuracy"] == pytest.approx(said["reward model: accuracy"], abs=0.05)
    assert measured["policy: parses"] == pytest.approx(said["policy: parses"], abs=0.1)
    assert said["reward model: accuracy where negated"] > 0.9


@pytest.mark.slow
def test_the_recipe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["recipe", "--output", str(tmp_path), "--scale", "0.001"])
    recipe.main()
    made, shipped = (json.loads(path.read_text()) for path in (tmp_path / "evaluation.json", EVALUATION))
    assert made.keys() == shipped.keys()
