"""Slabs that compute entries as they are read: sampler settings of tokens, reduced vocabularies."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.plain_sampling import adjusted, processed
from helpers.random_rounds import BATCH, VOCAB, WIDE, WIDE_BATCH, Rounds, random_rounds

import jaxspec as js
from jaxspec import Status, audit, layouts
from jaxspec.slabs import AdjustedLogits, Penalties, ReducedVocabulary, token_bits

TINY = 40  # more than one word of bits


def random_settings(seed: int) -> dict[str, Any]:
    """Settings of one sequence, each left out in one of three."""
    rng = np.random.default_rng(seed)
    bias = np.round(rng.normal(0, 2, TINY), 2)
    bias[rng.integers(0, TINY, 3)] = -np.inf
    settings = {
        "bias": bias,
        "allowed": rng.random(TINY) < 0.7,
        "output": tuple(rng.integers(0, TINY, 9).tolist()),
        "prompt": tuple(rng.integers(0, TINY, 9).tolist()),
        "repetition": 1.3,
        "frequency": 0.4,
        "presence": -0.7,
        "temperature": 0.6,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
    }
    return {name: value for name, value in settings.items() if rng.random() < 0.67}


def logits_of(values: np.ndarray, given: dict[str, Any], above: tuple[int, ...] = ()) -> js.Logits:
    """The same settings as a source; `above` are the tokens of the output that were drafted."""
    values = np.atleast_2d(values)
    output = given.get("output", ())[: len(given.get("output", ())) - len(above)]
    slab = AdjustedLogits(
        values=jnp.asarray(values, jnp.float32),
        allowed=None if "allowed" not in given else token_bits(jnp.asarray(given["allowed"])[None]),
        bias=None if "bias" not in given else jnp.asarray(given["bias"], jnp.float32)[None],
        penalties=Penalties(
            counts=jnp.asarray(np.bincount(output, minlength=values.shape[1]), jnp.int16)[None],
            in_prompt=token_bits(
                jnp.asarray(np.isin(np.arange(values.shape[1]), given.get("prompt", ())))
            )[None],
            repetition=jnp.full(1, given.get("repetition", 1.0), jnp.float32),
            frequency=jnp.full(1, given.get("frequency", 0.0), jnp.float32),
            presence=jnp.full(1, given.get("presence", 0.0), jnp.float32),
        ),
        above=jnp.asarray(above, jnp.int32)[None] if above else None,
    )
    return js.Logits(
        values=slab,
        temperature=jnp.float32(given.get("temperature", 1.0)),
        top_k=jnp.int32(given.get("top_k", 0)),
        top_p=jnp.float32(given.get("top_p", 1.0)),
        min_p=jnp.float32(given.get("min_p", 0.0)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_setting_alone_and_together_gives_the_law_of_its_definition(seed: int) -> None:
    given = random_settings(seed)
    row = np.random.default_rng(seed).normal(0, 2, TINY).astype(np.float32)
    row[3] = -np.inf
    wanted = processed(row, **given)
    above = given.get("output", ())[-4:]
    for drafted in ((), above):
        found = js.dense_rows(logits_of(row, given, drafted), 1)[0]
        np.testing.assert_allclose(found, wanted, atol=2e-6)


ROWS = {  # logits of the target and of the draft after a context; after all others those of ()
    (): (np.array([0.5, -1.0, 1.0, 0.2]), np.array([0.1, 0.4, -0.2, 1.0])),
    (2,): (np.array([-0.5, 0.5, 0.0, 1.2]), np.array([0.3, 0.3, -1.0, 0.6])),
    (3,): (np.array([1.5, 0.5, -1.0, 0.0]), np.array([0.0, -0.5, 0.8, 0.6])),
}
CONTEXTS = [(), *((a,) for a in range(4)), *((a, b) for a in range(4) for b in range(4))]
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "bias": {"bias": np.array([0.5, -1.5, 0.0, 0.7])},
    "mask": {"allowed": np.array([True, True, False, True])},
    "repetition": {"output": (2,), "prompt": (1,), "repetition": 1.7},
    "frequency and presence": {"output": (2, 2), "frequency": 0.3, "presence": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.4},
}
SETTINGS["all"] = {name: value for each in SETTINGS.values() for name, value in each.items()}


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


CASES = [(js.RULES["token"], name) for name in SETTINGS]
CASES += [(rule, "all") for rule in js.RULES.values() if rule.name != "token"]


@pytest.mark.parametrize(("rule", "name"), CASES, ids=[f"{r.name}-{n}" for r, n in CASES])
def test_every_rule_has_the_law_of_the_processed_target_whatever_the_draft_knows(
    rule: js.Rule, name: str
) -> None:
    """The draft knows no setting: it proposes what a mask excludes, which is tested and rejected."""
    given, is_fixed = SETTINGS[name], rule.proposal is js.PointMass
    output = given.get("output", ())
    raw = {context: ROWS.get(context, ROWS[()]) for context in CONTEXTS}
    instance = audit.Instance(
        name,
        target={
            context: processed(rows[0], **{**given, "output": (*output, *context)}).tolist()
            for context, rows in raw.items()
        },
        draft=None if is_fixed else {c: softmax(rows[1]).tolist() for c, rows in raw.items()},
        branching=(1, 1) if rule.is_path else (2,),
        candidates={(): (2, 3), (3,): (1, 0)} if is_fixed else None,
        bonus=True,
    )
    logits = jnp.asarray(np.stack([rows[0] for rows in ROWS.values()]), jnp.float32)

    def verify(draws: js.Draws, proposal: js.Proposal, rows: Any, bonus: Any) -> js.Verdict:
        above = proposal.tree.tokens_above
        is_first = (above[:, 0] >= 2) & jnp.all(above[:, 1:] < 0, axis=1)
        source = logits_of(np.zeros(4), given)
        slab = dataclasses.replace(
            source.values,
            values=logits[jnp.where(is_first, above[:, 0] - 1, 0)],
            above=above,
            allowed=None
            if source.values.allowed is None
            else jnp.tile(source.values.allowed, (len(above), 1)),
        )
        return rule.verify(draws, proposal, dataclasses.replace(source, values=slab), bonus)

    law = audit.exact_law(rule, instance, verify)
    assert law.is_proved, law.failures
    assert law.tv <= 1e-6


def batch_of(rounds: Rounds, seed: int) -> tuple[AdjustedLogits, jax.Array]:
    """Adjust the target rows of a batch, every array mapped; and the tokens above each node."""
    rng = np.random.default_rng(seed)
    batch, nodes, vocab = rounds.target.shape
    allowed = rng.random((batch, nodes, vocab)) < 0.8
    allowed[..., 0] = True
    slab = AdjustedLogits(
        values=jnp.log(jnp.maximum(jnp.asarray(rounds.target), 1e-9)),
        allowed=jax.jit(token_bits)(jnp.asarray(allowed)),
        bias=jnp.asarray(rng.normal(size=(batch, 1, vocab)), jnp.float32),
        penalties=Penalties(
            counts=jnp.asarray(rng.integers(0, 3, (batch, 1, vocab)), jnp.int8),
            repetition=jnp.full((batch, 1), 1.2),
            frequency=jnp.full((batch, 1), 0.3),
            presence=jnp.full((batch, 1), 0.2),
        ),
        above=jax.vmap(lambda tree: tree.tokens_above)(rounds.tree()),
        sequence=jnp.asarray(rng.integers(-1, 1, (batch, nodes)), jnp.int32),
    )
    return slab, jnp.asarray(rng.permutation(batch), jnp.int32)


@jax.jit
def dense(slab: AdjustedLogits) -> jax.Array:
    rows = jnp.arange(slab.shape[0], dtype=jnp.int32)
    return jax.vmap(lambda row: slab.read(row, 0, slab.shape[1]))(rows)


@pytest.mark.parametrize(("batch", "vocab"), [(BATCH, VOCAB), (WIDE_BATCH, WIDE)])
@pytest.mark.parametrize("are_shared", [False, True])
@pytest.mark.parametrize("name", ["token", "traversal"])
def test_a_batch_of_adjusted_rows_is_verified_as_their_dense_rows(
    name: str, are_shared: bool, batch: int, vocab: int
) -> None:
    """Settings mapped with the batch, or one table for all that each sequence has its place in."""
    rule = js.RULES[name]
    rounds = random_rounds(rule, 80, batch=batch, vocab=vocab)
    slab, places = batch_of(rounds, 81)
    draws, proposal, _, bonus = rounds.arguments(rule.proposal)
    axes = jax.tree.map(lambda _: 0, slab)
    if are_shared:  # one row of each table is of nobody
        tables = (slab.bias, slab.penalties)
        bias, penalties = jax.tree.map(lambda x: x[jnp.argsort(places), 0], tables)
        owner = jnp.where(slab.sequence >= 0, places[:, None], -1)
        slab = dataclasses.replace(slab, bias=bias, penalties=penalties, sequence=owner)
        axes = dataclasses.replace(axes, bias=None, penalties=None)
    rows = jax.vmap(dense, in_axes=(axes,))(slab)
    cold = jnp.float32(0.8)

    def verify(draws: Any, proposal: Any, values: Any, bonus: Any) -> js.Verdict:
        return rule.verify(draws, proposal, js.Logits(values=values, temperature=cold), bonus)

    verdicts = [
        jax.jit(jax.vmap(verify, in_axes=(0, 0, over, 0)))(draws, proposal, values, bonus)
        for values, over in ((slab, axes), (rows, 0))
    ]
    jax.tree.map(np.testing.assert_array_equal, *verdicts)
    assert not verdicts[0].status.any()


def test_requests_of_a_flat_batch_have_settings_of_their_own() -> None:
    rng = np.random.default_rng(5)
    counts, longest, vocab = np.array([2, -1, 3, 0, 1]), 3, 40
    batch, total = len(counts), int(counts.clip(0).sum())
    tokens = rng.integers(0, vocab, total)
    logits = rng.normal(0, 2, (total + batch, vocab + 3)).astype(np.float32)
    allowed = rng.random((total + batch, vocab)) < 0.8
    bias = rng.normal(size=(batch, vocab)).astype(np.float32)
    texts = [tuple(rng.integers(0, vocab, 60).tolist()) for _ in range(batch)]
    strength = np.linspace(0.2, 1, batch)
    penalties = Penalties(
        counts=jnp.asarray([np.bincount(text, minlength=vocab) for text in texts], jnp.int32),
        repetition=jnp.asarray(1 + strength, jnp.float32),
        frequency=jnp.asarray(strength, jnp.float32),
        presence=jnp.asarray(-strength, jnp.float32),
    )
    rows, at = np.full((total + batch, vocab), np.nan), 0
    for b, count in enumerate(counts):
        start = int(counts[:b].clip(0).sum())
        for place in range(count + 1 if count >= 0 else 0):
            drafted = tuple(tokens[start : start + place].tolist())
            rows[at] = adjusted(
                logits[at, :vocab],
                bias=bias[b],
                allowed=allowed[at],
                output=(*texts[b], *drafted),
                repetition=1 + strength[b],
                frequency=strength[b],
                presence=-strength[b],
            )
            at += 1
    batch_of_rows = layouts.FlatBatch(
        draft_token_ids=jnp.asarray(tokens, jnp.int32),
        num_draft_tokens=jnp.asarray(counts, jnp.int32),
        draft_rows=None,
        target_rows=js.Logits(values=jnp.asarray(logits), temperature=jnp.ones(batch), vocab=vocab),
        has_bonus_rows=True,
    )
    settings = {"bias": jnp.asarray(bias), "penalties": penalties}
    adjusted_batch = batch_of_rows.adjusted(
        longest, allowed=token_bits(jnp.asarray(allowed)), **settings
    )
    wanted = dataclasses.replace(
        batch_of_rows,
        target_rows=js.Logits(values=jnp.asarray(rows, jnp.float32), temperature=jnp.ones(batch)),
    )
    for seed in range(40):
        keys = layouts.request_keys(range(seed * batch, (seed + 1) * batch))
        draws = layouts.request_draws(keys, jnp.arange(batch), longest)
        outputs = [layouts.verify_flat(each, draws) for each in (adjusted_batch, wanted)]
        jax.tree.map(np.testing.assert_array_equal, *outputs)
    with pytest.raises(ValueError, match=r"target_rows is .*must be Logits"):
        dataclasses.replace(batch_of_rows, target_rows=jnp.ones((12, 4))).adjusted(3)


@pytest.mark.parametrize("vocab", [31, 32, 33, 100, 1000])
def test_a_stretch_of_a_row_holds_the_entries_of_its_tokens_wherever_it_lies(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    slab = AdjustedLogits(
        values=jnp.asarray(rng.normal(size=(2, vocab)), jnp.float32),
        allowed=token_bits(jnp.asarray(rng.random((2, vocab)) < 0.5)),
    )
    tokens = jnp.arange(vocab, dtype=jnp.int32)
    whole = np.asarray(slab.at(jnp.ones_like(tokens), tokens))
    for size in {1, 31, min(64, vocab), vocab} & set(range(vocab + 1)):
        read = jax.jit(lambda start, size=size: slab.read(jnp.int32(1), start, size))
        for start in range(max(0, vocab - size - 70), vocab - size + 1):
            np.testing.assert_array_equal(read(start), whole[start : start + size])


@pytest.mark.parametrize("field", ["bias", "repetition", "frequency", "presence", "logit"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_setting_or_a_bad_logit_that_is_masked_gives_no_token(field: str, bad: float) -> None:
    given = {"allowed": np.arange(TINY) != 7, "output": (3,), "bias": np.zeros(TINY)}
    row = np.zeros(TINY)
    if field == "bias":
        given["bias"][5] = bad
    elif field == "logit":
        row[7] = bad
    else:
        given[field] = bad
    draws = js.Draws(accept=jnp.zeros(1), final=jnp.full(2, 0.5))
    alone = js.PointMass(tree=js.make_tree([-1], [-1]))
    verdict = js.verify_tree(draws, alone, logits_of(row, given))
    assert verdict.tokens.tolist() == [-1]
    assert verdict.status == Status.NON_FINITE_ROW


@pytest.mark.parametrize("what", ["a sequence beyond the tables", "a negative count"])
def test_tables_that_cannot_be_meant_give_no_token(what: str) -> None:
    rows = logits_of(np.zeros(TINY), {"bias": np.zeros(TINY)})
    slab = dataclasses.replace(rows.values, sequence=jnp.ones(1, jnp.int32))
    if what == "a negative count":
        counts = rows.values.penalties.counts.at[0, 5].set(-1)
        penalties = dataclasses.replace(rows.values.penalties, counts=counts)
        slab = dataclasses.replace(rows.values, penalties=penalties)
    draws = js.Draws(accept=jnp.zeros(1), final=jnp.full(2, 0.5))
    alone = js.PointMass(tree=js.make_tree([-1], [-1]))
    verdict = js.verify_tree(draws, alone, dataclasses.replace(rows, values=slab))
    assert verdict.tokens.tolist() == [-1]
    assert verdict.status == Status.NON_FINITE_ROW


def test_a_sequence_beyond_its_tables_does_not_read_those_of_the_next_one() -> None:
    vocab = 5000  # a batch is laid end to end
    slab = AdjustedLogits(
        values=jnp.zeros((2, 1, vocab)),
        bias=jnp.zeros((2, 1, vocab)),
        sequence=jnp.array([[1], [0]], jnp.int32),
    )
    draws = js.Draws(accept=jnp.zeros((2, 1)), final=jnp.full((2, 2), 0.5))
    alone = js.PointMass(tree=js.make_tree([-1], [-1]))

    def one(draws: js.Draws, values: AdjustedLogits) -> js.Verdict:
        return js.verify_tree(draws, alone, js.Logits(values=values, temperature=jnp.float32(1)))

    verdicts = jax.vmap(one)(draws, slab)
    assert verdicts.status.tolist() == [Status.NON_FINITE_ROW, 0]
    assert verdicts.tokens[0].tolist() == [-1]


def test_a_mask_that_allows_nothing_leaves_a_row_without_mass() -> None:
    draws = js.Draws(accept=jnp.zeros(1), final=jnp.full(2, 0.5))
    alone = js.PointMass(tree=js.make_tree([-1], [-1]))
    rows = logits_of(np.zeros(TINY), {"allowed": np.zeros(TINY, bool)})
    assert js.verify_tree(draws, alone, rows).status == Status.MASSLESS_ROW


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("allowed", jnp.ones((1, 1), jnp.uint32), "allowed has rows of 1 words: the .* needs 2"),
        ("allowed", jnp.ones((2, 2), jnp.uint32), r"allowed has shape \[2, 2\]: must be \[R, "),
        ("bias", jnp.zeros((1, 39)), "bias has rows of 39 entries: the vocabulary needs 40"),
        ("bias", jnp.zeros((1, 40), jnp.int32), "bias has dtype int32: must be a float dtype"),
        ("above", jnp.zeros(3, jnp.int32), r"above has shape \[3\]: must be \[R, D\]"),
        ("sequence", jnp.zeros(2, jnp.int32), r"sequence has shape \[2\]: must be \[R\]"),
    ],
)
def test_tables_of_another_shape_are_named(field: str, value: jax.Array, message: str) -> None:
    source = logits_of(np.zeros(TINY), {"bias": np.zeros(TINY)})
    rows = dataclasses.replace(source, values=dataclasses.replace(source.values, **{field: value}))
    with pytest.raises(AssertionError, match=message):
        js.dense_rows(rows, 1)


# --- reduced vocabularies


@pytest.mark.parametrize(("batch", "vocab", "known"), [(BATCH, VOCAB, 5), (WIDE_BATCH, WIDE, 900)])
@pytest.mark.parametrize("are_logits", [False, True])
def test_a_draft_of_a_reduced_vocabulary_is_verified_as_its_rows_over_the_whole(
    batch: int, vocab: int, known: int, are_logits: bool
) -> None:
    rule = js.RULES["token"]
    rounds = random_rounds(rule, 90, batch=batch, vocab=vocab)
    rng = np.random.default_rng(91)
    ids = rng.permutation(vocab)[:known]
    reduced = rng.dirichlet(np.ones(known), rounds.tokens.shape).astype(np.float32)
    if are_logits:
        reduced = np.log(np.maximum(reduced, 1e-9))
    missing = -np.inf if are_logits else 0.0
    rounds.tokens[:, 1:] = np.where(
        rounds.tokens[:, 1:] < 0, -1, rng.choice(ids, rounds.tokens[:, 1:].shape)
    )
    whole = np.full((*rounds.tokens.shape, vocab), missing, np.float32)
    whole[..., ids] = reduced
    laws = jax.nn.softmax(jnp.asarray(whole), axis=-1) if are_logits else whole
    rounds.target[...] = (rounds.target + np.asarray(laws)) / 2  # some candidates are accepted
    draws, proposal, target, bonus = rounds.arguments(rule.proposal)

    def verify(values: Any) -> js.Verdict:
        def one(draws: Any, tree: js.Tree, values: Any, target: Any, bonus: Any) -> js.Verdict:
            rows = js.Probabilities(values=values)
            if are_logits:
                rows = js.Logits(values=values, temperature=jnp.float32(1))
            return rule.verify(draws, js.WithReplacement(tree=tree, draft_rows=rows), target, bonus)

        axes = jax.tree.map(lambda x: 0 if x.ndim == 3 else None, values)
        mapped = jax.vmap(one, in_axes=(0, 0, axes, 0, 0))
        return jax.jit(mapped)(draws, proposal.tree, values, target, bonus)

    slab = ReducedVocabulary.of(jnp.asarray(reduced[0]), ids, vocab=vocab, missing=missing)
    slab = dataclasses.replace(slab, values=jnp.asarray(reduced))
    verdicts = [verify(slab), verify(jnp.asarray(whole))]
    jax.tree.map(np.testing.assert_array_equal, *verdicts)
    assert not verdicts[0].status.any()
    assert verdicts[0].num_accepted.any()


def test_sequences_may_have_reduced_vocabularies_of_their_own() -> None:
    rng = np.random.default_rng(7)
    vocab, known, batch = 5000, 6, 3
    ids = np.stack([rng.permutation(vocab)[:known] for _ in range(batch)])
    values = rng.normal(size=(batch, 2, known)).astype(np.float32)
    slabs = [
        ReducedVocabulary.of(jnp.asarray(v), i, vocab=vocab)
        for v, i in zip(values, ids, strict=True)
    ]
    slab = jax.tree.map(lambda *xs: jnp.stack(xs), *slabs)
    path = js.chain(jnp.asarray(ids[0, :1], jnp.int32))
    draws = js.Draws(accept=jnp.zeros((batch, 2)), final=jnp.full((batch, 2), 0.5))

    def one(draws: js.Draws, values: Any) -> js.Verdict:
        rows = js.Logits(values=values, temperature=jnp.float32(1))
        return js.verify_path(draws, js.PointMass(tree=path), rows, True)

    found = jax.vmap(one)(draws, slab)
    alone = [one(jax.tree.map(lambda x, b=b: x[b], draws), slabs[b]) for b in range(batch)]
    jax.tree.map(
        np.testing.assert_array_equal, found, jax.tree.map(lambda *x: jnp.stack(x), *alone)
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 4, 1], "entry 0 is 1, which is listed again"),
        ([1, 4], "rows have 3 entries"),
        ([1, 4, 9], "9"),
    ],
)
def test_ids_that_are_no_vocabulary_are_named(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReducedVocabulary.of(jnp.zeros((1, 3)), ids, vocab=9)
