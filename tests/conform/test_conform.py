"""`conform` names an error that is put into a drafter; engines that draft as we do conform."""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moa_data.conform import run as conform_module
from moa_data.conform.run import Conformance, ask_engine, compare
from moa_data.conform.wrong_choices import CHOICES
from moa_data.errors import OptionInvalid
from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters import block, caches, eagle3, training
from moa_data.moa.drafters.eagle import FeatureState
from moa_data.moa.formats.checkpoint import LAYOUTS, load_drafter, save_drafter, write_layout
from moa_data.moa.formats.engines import FORMATS
from moa_data.moa.nn import layers
from moa_data.moa.nn.markov import GatedMarkovHead, MarkovHead, RecurrentMarkovHead
from moa_data.moa.targets.cache import TargetCache
from moa_data.moa.targets.live import Target
from moa_data.tests.kit import drafters as kit
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_model, random_prompts, write_target
from moa_data.tests.kit.variants import quick

N_LAYERS, N_NEW = 6, 10
ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
KINDS = ("eagle", "eagle3", "dflash", "dspark", "independent")


@pytest.fixture(scope="module")
def target() -> Target:
    model: Any = build_model(
        num_hidden_layers=N_LAYERS, rope_parameters=ROPE, eos_token_id=7, pad_token_id=5
    )
    model.generation_config.eos_token_id = None
    made = Target(model)
    made.eos_token_ids = frozenset()
    return made


def build(kind: str, target: Target, **sizes: Any) -> Any:
    """Build a drafter in which every part has an effect: norms and biases are random too."""
    own: dict[str, Any] = {
        "eagle": {"eagle_input_norm": False},
        "eagle3": {"fused_layers": (1, 3, 5), "draft_vocabulary": 40},
        "dflash": {"fused_layers": (1, 3), "block_layers": 2, "block_size": 5, "mask_token": 33},
        "dspark": {
            "fused_layers": (1, 3),
            "block_layers": 2,
            "block_size": 4,
            "mask_token": 33,
            "markov_rank": 8,
        },
        "independent": {},
    }
    drafter = kit.build(kind, target.model, std=0.3, **(own[kind] | sizes))
    torch.manual_seed(5)
    for name, weight in drafter.named_parameters():
        if weight.ndim == 1 or name == "lm_head.weight":
            torch.nn.init.normal_(weight, 0.0 if name.endswith("bias") else 1.0, 0.5)
        if name in ("markov_head.markov_w2.weight", "markov_head.joint_proj.weight"):
            weight.data *= 4
    return drafter


def answers_of(
    drafter: Any, target: Target, prompts: list[list[int]], n_drafts: int = 3
) -> list[dict[str, Any]]:
    """Answer as another engine would: our own loop, with a drafter that may be wrong."""
    answers = []
    for prompt in prompts:
        said: list[tuple[list[int], int]] = []

        def on_round(drafts: Any, accepted: list[list[int]], said: Any = said) -> None:
            said.append((drafts.on_host[0][0], 1 + len(accepted[0])))

        depth = min(n_drafts, drafter.config.max_depth or n_drafts)
        proposer = DrafterProposer(kit.frozen_for(drafter, target.model), drafter)
        (answer,) = generate_batch(
            target,
            [prompt],
            max_new_tokens=N_NEW,
            proposer=proposer,
            tree=TreeShape(depth),
            on_round=on_round,
        )
        ends = accumulate((n for _, n in said), initial=len(prompt) + 1)
        rounds = [(n, drafts) for n, (drafts, _) in zip(ends, said, strict=False) if drafts]
        answers.append({"tokens": answer.tokens, "rounds": rounds})
    return answers


# The test of the command finds that dflash conforms.
@pytest.mark.parametrize("kind", quick(KINDS, ("eagle3", "dspark")))
def test_a_drafter_conforms_with_itself(target: Target, kind: str) -> None:
    drafter, prompts = build(kind, target), random_prompts(2, 9)
    found = compare(drafter, target, prompts, answers_of(drafter, target, prompts), N_NEW)
    assert not found.partings
    assert not found.other_answers
    assert found.n_rounds > 15


# Wrong choices are put in elsewhere than `CHOICES` puts them in: in sizes, weights, and methods of
# the classes.
Wrong = Callable[[pytest.MonkeyPatch, Any, Target], Any]


def resized(**changes: Any) -> Wrong:
    """Build a drafter with the same weights and other sizes."""

    def change(patch: pytest.MonkeyPatch, drafter: Any, target: Target) -> Any:
        given = {
            name: value(drafter.config) if callable(value) else value
            for name, value in changes.items()
        }
        made = type(drafter)(replace(drafter.config, **given))
        made.load_state_dict(drafter.state_dict(), strict=False)
        return made.eval()

    return change


def patched(owner: Any, name: str, method: Callable[..., Any]) -> Wrong:
    """Replace a class's method or property. The new method gets the original one first."""

    def change(patch: pytest.MonkeyPatch, drafter: Any, target: Target) -> Any:
        plain = getattr(owner, name)
        made = (
            property(method)
            if isinstance(plain, property)
            else lambda *given: method(plain, *given)
        )
        patch.setattr(owner, name, made)
        return drafter

    return change


def before_the_final_norm(patch: pytest.MonkeyPatch, drafter: Any, target: Target) -> Any:
    drafter.observed_layers = (N_LAYERS - 1,)
    return drafter


def weighted(change: Callable[[dict[str, Tensor]], object]) -> Wrong:
    """Change weights in place."""

    def apply(patch: pytest.MonkeyPatch, drafter: Any, target: Target) -> Any:
        with torch.no_grad():
            change(drafter.state_dict())
        return drafter

    return apply


def reverse_fused(weights: dict[str, Tensor]) -> None:
    fc = weights["fc.weight"]
    fc.copy_(torch.cat(fc.chunk(fc.shape[1] // fc.shape[0], dim=1)[::-1], dim=1))


def last_layer_normed(patch: pytest.MonkeyPatch, drafter: Any, target: Target) -> Any:
    plain, norm = TargetCache.keep_layer_outputs, target.body.norm
    patch.setattr(
        TargetCache, "keep_layer_outputs", lambda s, out: plain(s, [*out[:-1], norm(out[-1])])
    )
    return drafter


def without(name: str) -> Wrong:
    def change(patch: pytest.MonkeyPatch, drafter: Any, target: Target) -> Any:
        drafter.get_submodule(name).forward = lambda x: x
        return drafter

    return change


def context_of(by: int = 0, normed: bool = False) -> Wrong:
    """Shift the positions of the context, or norm the context again in each layer.

    A shift has the effect of an opposite shift of the block's positions.
    """

    def append(plain: Any, self: Any, state: Any, context: Tensor, counts: Any) -> None:
        rotation = self.rotary(torch.arange(context.shape[1])[None] + state.n_true[0] + by)
        for layer, buffer in zip(self.blocks, state.slots, strict=True):
            seen = layer.input_layernorm(context) if normed else context
            buffer.append(*layer.self_attn.keys_values(seen, rotation), counts)
        state.n_true = [length + count for length, count in zip(state.n_true, counts, strict=True)]

    return patched(block.BlockDrafter, "_append_context", append)


def heads(normed: str = "qk", rotated: bool = True) -> Wrong:
    """Project keys without norm or without rotation."""

    def keys_values(
        plain: Any, self: Any, x: Tensor, rotation: Any, scale: Any = None
    ) -> tuple[Tensor, Tensor]:
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        keys = (self.k_norm(keys) if "k" in normed else keys).transpose(1, 2)
        values = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return layers.rotate(keys, rotation) if rotated else keys, values

    return patched(layers.Attention, "keys_values", keys_values)


def slots_see(pick: Callable[[int, int], Any]) -> Wrong:
    """Let slot q of a block see key k if ``pick(q, k)``; k counts from the block's first slot."""

    def run_layers(plain: Any, self: Any, x: Tensor, at: Tensor, appends: Any, mask: Any) -> Any:
        n, before = x.shape[1], int(at[0, 0])
        rows = [[bool(pick(q, k)) for k in range(-before, n)] for q in range(n)]
        return plain(self, x, at, appends, torch.tensor(rows)[None])

    return patched(block.BlockDrafter, "run_layers", run_layers)


def at_depth(pick: Callable[[int], int]) -> Wrong:
    return patched(
        caches.LayerState, "begin_level",
        lambda plain, self, rotary, level: plain(
            self, rotary, replace(level, depth=pick(level.depth))
        ),
    )  # fmt: skip


def slots_hold(pick: Callable[[Tensor, int], Tensor]) -> Wrong:
    def slots(plain: Any, self: Any, frozen: Any, anchors: Tensor) -> Tensor:
        tokens = torch.full((1, self.config.block_size), self.config.mask_token)
        found: Tensor = frozen.embed(pick(tokens, int(anchors)))
        return found

    return patched(block.BlockDrafter, "slots", slots)


def normed_by(embedding: bool, hidden: bool) -> Wrong:
    def normed(plain: Any, self: Any, x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=-1)
        return torch.cat(
            (
                self.input_layernorm(one) if embedding else one,
                self.hidden_norm(two) if hidden else two,
            ),
            dim=-1,
        )

    return patched(eagle3.Eagle3Block, "normed", normed)


def code_after(plain: Any, self: Any, memory: Tensor, hidden: Tensor) -> Any:
    embedded = memory[..., : self.rank]
    new = RecurrentMarkovHead.follow(
        self, memory, hidden, torch.zeros(memory.shape[:-1], dtype=torch.int64)
    )
    return plain(self, torch.cat((embedded, new[..., self.rank :]), dim=-1), hidden)


def swap_halves(weights: dict[str, Tensor]) -> None:
    fc = weights["fc.weight"]
    fc.copy_(torch.cat(fc.chunk(2, dim=1)[::-1], dim=1))


EAGLE31 = {"fc_norm": True, "norm_output": True}
SPECULATORS = {"norm_before_fc": True}
RNN, GATED = {"markov_head": "rnn"}, {"markov_head": "gated"}
LOW, HIGH = "counted one too low", "counted one too high"
WRONG: list[tuple[str, str, dict[str, Any], Wrong]] = [
    ("before the final norm", "eagle", {}, before_the_final_norm),
    *((LOW, kind, {}, resized(fused_layers=lambda own: tuple(k - 1 for k in own.fused_layers)))
      for kind in ("eagle3", "dflash", "dspark")),
    (HIGH, "eagle3", {"fused_layers": (0, 2, 4)}, resized(fused_layers=(1, 3, 5))),
    (HIGH, "dflash", {}, resized(fused_layers=(2, 4))),
    ("in reverse order", "eagle3", {}, weighted(reverse_fused)),
    ("in reverse order", "dspark", {}, weighted(reverse_fused)),
    ("last layer is taken after the final norm", "eagle3", {}, last_layer_normed),
    ("final norm is left out", "eagle3", {}, without("norm")),
    ("final norm is left out", "dflash", {}, without("norm")),
    ("final norm is left out", "independent", {}, without("norm")),
    ("(hidden_norm) is left out", "dspark", {}, without("hidden_norm")),
    ("(hidden_norm) is left out", "eagle3", {}, normed_by(True, False)),
    ("(input_layernorm) is left out", "eagle3", {}, normed_by(False, True)),
    ("(norm_before_fc) is left out", "eagle3", SPECULATORS, resized(norm_before_fc=False)),
    ("(fc_norm) are left out", "eagle3", EAGLE31, resized(fc_norm=False)),
    ("(norm_before_residual)", "eagle3", {}, resized(norm_before_residual=True)),
    ("(norm_before_residual)", "eagle3", {"norm_before_residual": True},
     resized(norm_before_residual=False)),
    ("(norm_output)", "eagle3", {}, resized(norm_output=True)),
    ("(norm_output)", "eagle3", EAGLE31, resized(norm_output=False)),
    ("drafter's first layer is added", "eagle", {}, resized(eagle_input_norm=True)),
    ("drafter's first layer is added", "eagle", {"eagle_input_norm": True}, resized(eagle_input_norm=False)),
    ("(q_norm, k_norm)", "dflash", {}, patched(
        layers.Attention, "_heads", lambda plain, self, name, x, scale=None:
        getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2),
    )),
    ("k_norm is not applied", "dspark", {}, heads(normed="q")),
    ("of committed tokens once more", "dflash", {}, context_of(normed=True)),
    ("of committed tokens once more", "dspark", {}, context_of(normed=True)),
    ("block are one too high", "dflash", {}, context_of(by=-1)),
    ("block are one too low", "dspark", {}, context_of(by=1)),
    ("have its first position", "dflash", {}, patched(
        block.BlockDrafter, "run_layers",
        lambda plain, self, x, at, *rest: plain(self, x, 0 * at + at[0, 0], *rest)
    )),
    ("RoPE is not applied", "dspark", {}, heads(rotated=False)),
    ("after the first are one too high", "eagle", {}, at_depth(lambda depth: depth + 1)),
    ("after the first are one too high", "eagle3", {}, at_depth(lambda depth: depth + 1)),
    ("have the position of the first", "independent", {}, at_depth(lambda depth: 0)),
    ("RoPE has the base 10,000", "eagle", {}, resized(rope_parameters=ROPE | {"rope_theta": 1e4})),
    ("RoPE is not scaled", "eagle3", {},
     resized(rope_parameters={"rope_theta": 500.0, "rope_type": "default"})),
    ("10,000 and is not scaled", "dflash", {},
     resized(rope_parameters={"rope_theta": 1e4, "rope_type": "default"})),
    ("themselves and to earlier slots", "dflash", {}, slots_see(lambda q, k: k <= q)),
    ("themselves and to earlier slots", "dspark", {}, slots_see(lambda q, k: k <= q)),
    ("do not attend to each other", "dspark", {}, slots_see(lambda q, k: k < 0 or k == q)),
    ("last token before its anchor", "dflash", {}, slots_see(lambda q, k: k != -1)),
    ("mask token is 0", "dflash", {}, resized(mask_token=0)),
    ("mask token is one too low", "dspark", {}, resized(mask_token=32)),
    ("mask token is one too high", "dspark", {}, resized(mask_token=34)),
    ("mask token is the last token", "dflash", {}, resized(mask_token=66)),
    ("mask token is the padding token", "dflash", {}, resized(mask_token=5)),
    ("mask token is the EOS token", "dspark", {}, resized(mask_token=7)),
    ("mask token is the BOS token", "dspark", {}, resized(mask_token=1)),
    ("block contains the mask", "dflash", {}, slots_hold(lambda tokens, anchor: tokens)),
    ("block contain the anchor", "dspark", {},
     slots_hold(lambda tokens, anchor: torch.full_like(tokens, anchor))),
    ("(sample_from_anchor)", "dflash", {}, resized(sample_from_anchor=True)),
    ("(sample_from_anchor)", "dspark", {}, resized(sample_from_anchor=False)),
    ("Markov head is left out", "dspark", {},
     weighted(lambda own: own["markov_head.markov_w2.weight"].zero_())),
    ("reads the anchor for every draft", "dspark", {}, patched(
        MarkovHead, "follow", lambda plain, self, memory, hidden, tokens: memory
    )),
    ("reset before every draft", "dspark", RNN, patched(
        RecurrentMarkovHead, "follow",
        lambda plain, self, memory, hidden, tokens: self.begin(tokens)
    )),
    ("after its state is updated", "dspark", RNN, patched(RecurrentMarkovHead, "code", code_after)),
    ("as if it had the type vanilla", "dspark", GATED, patched(
        GatedMarkovHead, "code", lambda plain, self, memory, hidden: memory
    )),
    ("d2t is left out", "eagle3", {}, weighted(lambda weights: weights["d2t"].zero_())),
    ("not as offsets", "eagle3", {},
     weighted(lambda weights: weights["d2t"].sub_(torch.arange(40)))),
    ("target's LM head", "eagle3", {"draft_vocabulary": 67}, lambda patch, drafter, target: (
        drafter.lm_head.weight.data.copy_(target.model.lm_head.weight), drafter)[1]),
    ("in the wrong order", "eagle", {}, weighted(swap_halves)),
    ("in the wrong order", "eagle3", {}, patched(
        eagle3.Eagle3Drafter, "combine", lambda plain, self, one, two: torch.cat((two, one), dim=-1)
    )),
    ("its own token, not with the next", "eagle", {}, patched(
        FeatureState, "fresh_rows",
        lambda plain, self, text: plain(self, [[row[0], *row[:-1]] for row in text])
    )),
]  # fmt: skip


# Indices of the cases that run by default: of the first cases of each cause, every fourth one.
FIRST = {one[0]: number for number, one in reversed([*enumerate(WRONG)])}
QUICK = sorted(FIRST.values())[::4]


# By default an answer to one prompt is explained, and few wrong choices are tried before the
# expected one, the most similar ones. The slow variants try all that come before it.
@pytest.mark.parametrize(
    ("n_prompts", "n_before"),
    [
        pytest.param(1, 2, id="few"),
        pytest.param(2, len(CHOICES), id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("cause", "kind", "sizes", "wrong"),
    [
        pytest.param(
            *one, id=f"{one[1]}-{one[0]}", marks=[] if number in QUICK else pytest.mark.slow
        )
        for number, one in enumerate(WRONG)
    ],
)
def test_a_wrong_choice_is_named(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    cause: str,
    kind: str,
    sizes: dict[str, Any],
    wrong: Wrong,
    n_prompts: int,
    n_before: int,
) -> None:
    drafter, two_prompts = build(kind, target, **sizes), random_prompts(2, 9)
    expected = next(name for name in CHOICES if cause in name)
    # Choices after the expected one cannot become the first cause, and trying them takes most of
    # the time.
    index = [*CHOICES].index(expected)
    tried = dict(islice(CHOICES.items(), max(0, index - n_before), index + 1))
    monkeypatch.setattr(conform_module, "CHOICES", tried)
    # After a single prompt the drafts may be the right ones by chance.
    for prompts in (two_prompts[-n_prompts:], two_prompts):
        with monkeypatch.context() as patch:
            answers = answers_of(wrong(patch, copy.deepcopy(drafter), target), target, prompts)
        found = compare(drafter, target, prompts, answers, N_NEW)
        if found.partings:
            break
    assert found.causes[:1] == [expected], (found.causes, found.nearest)


def test_every_choice_is_put_in_somewhere() -> None:
    tested = {name for name in CHOICES for cause, *_ in WRONG if cause in name}
    elsewhere = {name for name in CHOICES if "own anchor" in name or "computes in" in name}
    assert tested | elsewhere == set(CHOICES)


def test_a_block_that_sees_its_anchors_state_is_named(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`conform` names a training mask with ``<=`` in place of ``<``.

    Such a block sees the target's state of its own anchor. Decoding cannot make this error, because
    the state does not exist yet.
    """
    drafter, prompts, answers = (
        build("dspark", target, markov_head="none"),
        random_prompts(1, 3),
        [],
    )
    plain = training.block_mask
    monkeypatch.setattr(training, "block_mask", lambda at, *rest: plain(at + 1, *rest))
    frozen = kit.frozen_for(drafter, target.model)
    for prompt in prompts:
        tokens = plain_generate(target, prompt, max_new_tokens=10).tokens
        text = torch.tensor([prompt + tokens])
        anchors = torch.arange(len(prompt), text.shape[1] - 1)[None]
        inputs = kit.stored(drafter, target.model, text, torch.ones_like(text, dtype=torch.bool))
        with torch.no_grad():
            hidden = drafter.hidden_at_anchors(
                frozen, inputs, anchors, torch.ones_like(anchors, dtype=torch.bool)
            )
            drafts = frozen.logits(hidden)[0].argmax(dim=-1).tolist()
        rounds = [(int(at) + 1, row) for at, row in zip(anchors[0], drafts, strict=True)]
        answers.append({"tokens": tokens, "rounds": rounds})
    found = compare(drafter, target, prompts, answers, 10)
    assert found.causes == ["a draft block reads the target's state of its own anchor"]


def test_another_dtype_is_named(target: Target) -> None:
    """bfloat16 is named as a cause or among the nearest choices.

    The target's states are rounded there too, on their way to the drafter.
    """
    drafter, prompts = build("eagle3", target), random_prompts(2, 9)
    model: Any = copy.deepcopy(target.model)
    other = Target(model.to(torch.bfloat16))
    other.eos_token_ids = frozenset()
    answers = answers_of(copy.deepcopy(drafter).to(torch.bfloat16), other, prompts)
    found = compare(drafter, target, prompts, answers, N_NEW)
    assert found.partings
    assert "the engine computes in bfloat16" in [*found.causes, *(found.nearest or ())]


def test_what_nobody_knows_is_told_as_such(target: Target) -> None:
    """Two wrong choices at once are unknown, because no single one explains all rounds."""
    drafter, prompts = build("eagle3", target), random_prompts(1, 9)
    with pytest.MonkeyPatch.context() as patch:
        wrong = normed_by(False, True)(patch, copy.deepcopy(drafter), target)
        answers = answers_of(weighted(reverse_fused)(patch, wrong, target), target, prompts)
    found = compare(drafter, target, prompts, answers, N_NEW)
    assert not found.causes
    assert "no known mistake" in found.describe()


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(made)
    return made


def ask(drafter: Any, target: Target, folder: Path, out: Path, **config: Any) -> Conformance:
    """Ask transformers about a drafter's folder with changed keys in config.json."""
    prompts, (layout, method) = random_prompts(2, 9), FORMATS["transformers"][drafter.kind]
    write_layout(drafter, LAYOUTS[layout], out)
    found = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(found | config))
    job = {
        "engine": "transformers", "method": method, "model": str(folder), "drafter": str(out),
        "prompts": prompts, "max_new_tokens": N_NEW, "dtype": "float32", "n_drafts": 4,
    }  # fmt: skip
    return compare(drafter, target, prompts, ask_engine(job, sys.executable, out.parent), N_NEW)


@pytest.mark.slow
def test_wrong_layers_of_transformers_itself_are_named(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    found = ask(build("dflash", target), target, folder, tmp_path / "own", target_layer_ids=[2, 4])
    assert found.causes == [next(name for name in CHOICES if HIGH in name)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "independent"])
def test_transformers_itself_conforms(
    target: Target, folder: Path, tmp_path: Path, kind: str
) -> None:
    assert not ask(build(kind, target), target, folder, tmp_path / "own").partings


def test_an_engine_that_fails_is_one_line(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho Traceback >&2\necho ValueError: no model >&2\nexit 1\n")
    failing.chmod(0o755)
    job = {
        "engine": "transformers",
        "method": "dflash",
        "dtype": "float32",
        "model": str(tmp_path / "nothing"),
    }
    with raises_naming(OptionInvalid, "transformers", failing, "ValueError: no model") as error:
        ask_engine(job, str(failing), tmp_path)
    assert "\n" not in str(error.value)
    with raises_naming(OptionInvalid, tmp_path / "python", "`python`"):
        ask_engine(job, str(tmp_path / "python"), tmp_path)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("command") / "target", num_hidden_layers=2)


@pytest.mark.parametrize(("kind", "code"), [("dflash", 0), ("eagle", 1)])
def test_the_command(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
) -> None:
    """The engine is our own loop; for EAGLE it leaves out a norm."""
    target = Target.load(str(target_folder), torch.float32, "cpu")
    drafter = kit.build(kind, target.model, target=target.identity)
    save_drafter(drafter, tmp_path / "drafter")

    def engine(job: dict[str, Any], python: str, folder: Path) -> list[dict[str, Any]]:
        assert load_drafter(job["drafter"]).config == drafter.config
        wrong = (
            drafter
            if kind == "dflash"
            else resized(eagle_input_norm=False)(monkeypatch, drafter, target)
        )
        return answers_of(wrong, target, job["prompts"], job["n_drafts"])

    monkeypatch.setattr("moa_data.conform.run.ask_engine", engine)
    words = [
        "conform",
        str(tmp_path / "drafter"),
        "--model",
        str(target_folder),
        "--max-new-tokens",
        "6",
    ]
    result = run(
        *words, "--with", "vllm", "--n-prompts", "2", "--out", str(tmp_path / "found.json")
    )
    assert result.exit_code == code, result.output
    assert ("cause        the input norm of the drafter's first layer" in result.stdout) == (
        kind == "eagle"
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert bool(found["partings"]) == bool(code)
    if kind == "eagle":
        refused(run(*words, "--with", "transformers"), "kind eagle")
        return
    nothing = {"tokens": [1], "rounds": []}
    monkeypatch.setattr(
        "moa_data.conform.run.ask_engine", lambda job, *_: [nothing] * len(job["prompts"])
    )
    refused(run(*words, "--with", "vllm"), "made no drafts")
