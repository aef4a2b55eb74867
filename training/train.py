"""Train the bundled pair: `python -m training.train --minutes 60 --out DIR`.

A target learns the characters of the bundled text; a draft learns them too, and then the target's
rows, because a draft is accepted with probability sum_x min(p(x), q(x)). The matrices are trained by
Muon and the rest by Adam, in float32, on windows that cover the text once per epoch. A run takes a
number of steps, and is then reproduced by its seed, or a number of minutes, to which its learning
rate schedule is fitted. An interrupted run continues when it is started again.

In the shape descriptions B denotes windows, L the length of a window, T that of the text.

References:
  Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
  Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015.
  Zhou et al., "DistillSpec: Improving Speculative Decoding via Knowledge Distillation", ICLR 2024.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxspec.extras import needs
from jaxspec.models import LanguageModel
from jaxspec.models.bundled import bundled_text
from jaxspec.models.llama import LlamaConfig, LlamaParams, init_llama, llama, rope_frequencies
from jaxspec.models.load.huggingface import load_huggingface
from jaxspec.models.text import encode, split_text
from training.measure import bits, measure_pair, text_rows, window_logits
from training.save import save_huggingface

_CONTEXT = 256
_TARGET_SHARE = 0.8  # of the minutes

Loss = Callable[[LlamaParams, jax.Array, jax.Array], jax.Array]
"""A function of the weights, windows [B, L + 1], and the progress of the run, from 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a run.

    Attributes:
      until: the progress of the run at its end; 1 for the last.
      length: L of its windows.
      loss: the loss it minimises.
    """

    until: float
    length: int
    loss: Loss


def pair_configs(vocab: int) -> tuple[LlamaConfig, LlamaConfig]:
    """Return the sizes of the bundled target and draft."""
    target = LlamaConfig(
        vocab=vocab,
        width=192,
        layers=4,
        heads=6,
        kv_heads=2,
        head_width=32,
        hidden=512,
        rope_frequencies=rope_frequencies(32),
        max_context=_CONTEXT,
    )
    draft = LlamaConfig(
        vocab=vocab,
        width=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_width=16,
        hidden=176,
        rope_frequencies=rope_frequencies(16),
        max_context=_CONTEXT,
    )
    return target, draft


def text_loss(config: LlamaConfig) -> Loss:
    """Return the mean of -log P(next character), in nats."""

    def loss(params: LlamaParams, windows: jax.Array, progress: jax.Array) -> jax.Array:
        del progress
        logs = jax.nn.log_softmax(window_logits(llama(config, params), params, windows[:, :-1]))
        return -jnp.take_along_axis(logs, windows[:, 1:, None], axis=-1).mean()

    return loss


def distillation_loss(config: LlamaConfig, target: LanguageModel) -> Loss:
    """Return the loss of a draft that learns a target's rows.

    Over the run it changes from the divergence KL(p, q), whose gradient is strong far from the
    target, to the distance 1 - sum_x min(p(x), q(x)), the probability that a draft is rejected.
    """

    def loss(params: LlamaParams, windows: jax.Array, progress: jax.Array) -> jax.Array:
        before = windows[:, :-1]
        p = jax.nn.log_softmax(window_logits(target, target.params, before))
        q = jax.nn.log_softmax(window_logits(llama(config, params), params, before))
        divergence = (jnp.exp(p) * (p - q)).sum(axis=-1).mean()
        rejected = jnp.abs(jnp.exp(p) - jnp.exp(q)).sum(axis=-1).mean() / 2
        return (1 - progress) * divergence + progress * rejected

    return loss


def train(
    config: LlamaConfig,
    stages: Sequence[Stage],
    tokens: npt.NDArray[np.int32],
    *,
    steps: int | None = None,
    minutes: float = 1.0,
    seed: int = 0,
    characters: int = 2048,
    learning_rate: float = 0.01,
    state: pathlib.Path | None = None,
    report: Callable[[LlamaParams, str], None] | None = None,
    report_seconds: float = 60.0,
    save_seconds: float = 60.0,
) -> tuple[LlamaParams, int]:
    """Train a network.

    Args:
      config: the sizes.
      stages: the parts of the run, in order.
      tokens: int32 [T], the text.
      steps: length of the run; None for a run of `minutes`. A run of fixed length is reproduced bit
        for bit by its seed on the same machine.
      minutes: length of the run where `steps` is None.
      seed: of weights and windows.
      characters: B L, characters per step.
      learning_rate: the peak, for matrices; Muon's updates are scaled to the size of Adam's.
      state: file to store the run in; if it exists, the run continues from it.
      report: called every `report_seconds` with the weights and a line of text.
      report_seconds: time between reports.
      save_seconds: time between writes of `state`.

    Returns:
      (the weights, the number of steps taken).

    Raises:
      ImportError: `optax` is not installed.
    """
    init_state = _optimizer(learning_rate).init
    params = init_llama(jax.random.key(seed), config)
    params = jax.tree.map(jnp.copy, params)  # norms share one array, but buffers are donated
    opt_state = init_state(params)
    taken, spent = 0, 0.0
    if state is not None and state.exists():
        (params, opt_state), taken, spent = _load_state(state, (params, opt_state))
    batches = _Batches(tokens, characters, seed)
    started = reported = saved = time.monotonic()
    while True:
        now = time.monotonic()
        over = spent + now - started
        progress = over / (60 * minutes) if steps is None else taken / steps
        is_done = progress >= 1
        if state is not None and (is_done or now - saved > save_seconds):
            saved = now
            _save_state(state, (params, opt_state), taken, over)
        if is_done:
            return params, taken
        stage = next(stage for stage in stages if progress < stage.until)
        windows = batches(taken, stage.length)
        update = _update(stage.loss, learning_rate)
        params, opt_state, value = update(params, opt_state, windows, jnp.float32(progress))
        value.block_until_ready()
        taken += 1
        if report is not None and now - reported > report_seconds:
            reported = now
            report(params, f"step {taken}, {progress:.0%} done, loss {float(value):.4f}")


class _Batches:
    """Windows of a text: each part once per epoch, shifted differently in each epoch."""

    def __init__(self, tokens: npt.NDArray[np.int32], characters: int, seed: int) -> None:
        self.tokens, self.characters, self.seed = tokens, characters, seed
        self._epoch = functools.lru_cache(maxsize=2)(self._draw)

    def __call__(self, step: int, length: int) -> jax.Array:
        """Return the windows [B, L + 1] of a step."""
        rows = max(self.characters // length, 1)
        windows = (len(self.tokens) - 1) // length - 1
        epoch, place = divmod(step, max(windows // rows, 1))
        shift, order = self._epoch(epoch, length, windows)
        starts = shift + order[place * rows : (place + 1) * rows] * length
        return jnp.asarray(self.tokens[starts[:, None] + np.arange(length + 1)])

    def _draw(self, epoch: int, length: int, windows: int) -> tuple[int, npt.NDArray[np.int64]]:
        rng = np.random.default_rng([self.seed, length, epoch])
        return int(rng.integers(length)), rng.permutation(windows)


@functools.lru_cache(maxsize=8)
def _update(loss: Loss, learning_rate: float) -> Callable[..., tuple[LlamaParams, Any, jax.Array]]:
    """Return one step of (weights, optimizer state, windows, progress), and the loss before it."""
    optimizer = _optimizer(learning_rate)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(
        params: LlamaParams, opt_state: Any, windows: jax.Array, progress: jax.Array
    ) -> tuple[LlamaParams, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, windows, progress)
        # The optimizer's code relies on promotion.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            change, opt_state = optimizer.update(gradient, opt_state, params)
        pace = jnp.minimum(1.0, progress / 0.02 + 0.05) * jnp.minimum(1.0, (1 - progress) / 0.8)
        return jax.tree.map(lambda w, c: w + pace * c, params, change), opt_state, value

    return update


def _optimizer(learning_rate: float) -> Any:
    """Return Muon for the matrices of the layers, Adam for embedding and norms."""
    try:
        import optax
        from optax.contrib import MuonDimensionNumbers, muon
    except ImportError as error:
        raise ImportError(needs("training", "optax", "train")) from error

    def matrices(params: LlamaParams) -> LlamaParams:
        marked = jax.tree.map(lambda w: MuonDimensionNumbers(1, 0) if w.ndim == 2 else None, params)
        return dataclasses.replace(marked, embedding=None, head=None)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            learning_rate,
            weight_decay=0.1,
            consistent_rms=0.2,
            adam_learning_rate=0.3 * learning_rate,
            adam_b2=0.95,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def _save_state(path: pathlib.Path, tree: Any, taken: int, spent: float) -> None:
    """Write a run; if interrupted, the old file or the new one is left."""
    leaves: dict[str, Any] = {str(n): leaf for n, leaf in enumerate(jax.tree.leaves(tree))}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new.npz")
    np.savez(fresh, taken=taken, spent=spent, **leaves)
    fresh.replace(path)


def _load_state(path: pathlib.Path, like: Any) -> tuple[Any, int, float]:
    """Read a run: (weights and optimizer state, steps, seconds)."""
    with np.load(path) as stored:
        leaves = [jnp.asarray(stored[str(n)]) for n in range(len(jax.tree.leaves(like)))]
        tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return tree, int(stored["taken"]), float(stored["spent"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description="Train a target and a draft on the bundled text; print their held-out quality.",
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--minutes", type=float, default=60.0, help="of both together (60)")
    parser.add_argument("--steps", type=int, help="of each, instead of minutes")
    parser.add_argument("--seed", type=int, default=0, help="of weights and windows (0)")
    parser.add_argument("--which", choices=("target", "draft", "both"), default="both")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write `OUT/target` and `OUT/draft`, and print the quality of both as JSON."""
    options = _parser().parse_args(arguments)
    text = bundled_text()
    alphabet = "".join(sorted(set(text)))
    tokens, held_out = (encode(split_text(text, part), alphabet) for part in (False, True))

    def run(name: str, config: LlamaConfig, stages: list[Stage], share: float, pace: float) -> None:
        model = llama(config, init_llama(jax.random.key(0), config))
        some = held_out[:8193]

        def report(params: LlamaParams, line: str) -> None:
            score = bits(text_rows(model, some, _CONTEXT, params=params), some)
            print(f"{name}: {line}, held-out bits {score:.4f}", flush=True)

        params, taken = train(
            config,
            stages,
            tokens,
            steps=options.steps,
            minutes=share * options.minutes,
            seed=options.seed,
            learning_rate=pace,
            state=options.out / f"{name}.npz",
            report=report,
        )
        report(params, f"done after {taken} steps")
        save_huggingface(options.out / name, config, params, alphabet)

    target_config, draft_config = pair_configs(len(alphabet))
    if options.which != "draft":
        loss = text_loss(target_config)
        stages = [Stage(0.7, _CONTEXT // 2, loss), Stage(1.0, _CONTEXT, loss)]
        run("target", target_config, stages, _TARGET_SHARE, 0.01)
    if options.which != "target":
        target = load_huggingface(options.out / "target")
        first, then = text_loss(draft_config), distillation_loss(draft_config, target)
        stages = [Stage(0.4, _CONTEXT // 2, first), Stage(1.0, _CONTEXT, then)]
        run("draft", draft_config, stages, 1 - _TARGET_SHARE, 0.017)
        draft = load_huggingface(options.out / "draft")
        figures = measure_pair(target, draft, split_text(text), held_out, alphabet, _CONTEXT)
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
