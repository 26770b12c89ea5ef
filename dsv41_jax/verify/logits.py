"""Cases `multi`, `text`, `short` and `greedy`: logits of whole runs, left to themselves."""

from collections.abc import Iterator

import numpy as np

from dsv41_jax.verify.forward import Forward
from dsv41_jax.verify.measure import (
    Measure,
    Rows,
    compare_logits,
    compare_rows,
    judge,
    pool,
)
from dsv41_jax.verify.tolerances import CLEAR_MARGIN, GREEDY, MULTI, RUN, Limits
from dsv41_jax.verify.vectors import VectorError, Vectors

RUN_CASES = ("text", "short")


def check_multi(forward: Forward, vectors: Vectors) -> Iterator[Measure]:
    """Independent short prompts, each in one go.

    Raises:
      VectorError: an array is missing or misshapen.
    """
    prompts = vectors.token_ids("input_ids", forward.config.vocab_size)
    wanted, rows = vectors["logits"], []
    if len(prompts) != len(wanted):
        raise VectorError(f"logits of {len(wanted)} prompts are recorded, but {len(prompts)} ids")
    for index, (prompt, want) in enumerate(zip(prompts, wanted, strict=True)):
        run = forward.run(prompt, len(prompt))
        rows.append(compare_logits(f"logits[{index}]", run.phases["prefill"].head["logits"], want))
    yield from judge("multi", "prefill", "logits", {None: pool(rows)}, MULTI)


def check_run(case: str, forward: Forward, vectors: Vectors) -> Iterator[Measure]:
    """A prompt, then a step for each further token."""
    token_ids = vectors.token_ids("input_ids", forward.config.vocab_size)
    prefill_len = vectors.prefill_len(len(token_ids))
    run = forward.run(token_ids, prefill_len)
    for phase, found in run.phases.items():
        for quantity, limits in _quantities(phase).items():
            recorded = "logits_all" if (phase, quantity) == ("prefill", "logits") else quantity
            if (name := f"{phase}.{recorded}") not in vectors or quantity not in found.head:
                continue
            got = found.head[quantity]
            if f"{phase}.keep_pos" in vectors:
                got = got[vectors[f"{phase}.keep_pos"]]
            compare = compare_logits if quantity == "logits" else compare_rows
            rows = compare(name, got, vectors[name])
            yield from judge(case, phase, quantity, {None: rows}, limits)
    if (name := "oneshot.logits_tail") in vectors and "decode" in run.phases:
        # A step and the same row of one prefill are one computation here.
        rows = compare_logits(name, run.phases["decode"].head["logits"], vectors[name])
        yield from judge(case, "oneshot", "logits", {None: rows}, RUN["decode"])


def _quantities(phase: str) -> dict[str, Limits]:
    return {"logits": RUN[phase], "final_h": (), "final_normed": (), "main_hidden": ()}


def check_greedy(forward: Forward, vectors: Vectors) -> Iterator[Measure]:
    """The prompt, then the recorded greedy tokens; the last row of the prompt counts."""
    vocab = forward.config.vocab_size
    prompt, generated = (vectors.token_ids(name, vocab) for name in ("prompt_ids", "gen_ids"))
    run = forward.run(np.concatenate([prompt, generated[:-1]]), len(prompt))
    got = [run.phases["prefill"].head["logits"][-1:]]
    if "decode" in run.phases:
        got.append(run.phases["decode"].head["logits"])
    rows = compare_logits("logits", np.concatenate(got), vectors["logits"])
    yield from judge("greedy", "decode", "logits", {None: rows}, RUN["decode"])
    clear = vectors["margin"] > CLEAR_MARGIN if "margin" in vectors else np.zeros(0, bool)
    if clear.any():
        chosen = Rows(equal=rows.equal[clear], overlap=rows.overlap[clear])
        yield from judge("greedy", "decode", "argmax", {None: chosen}, GREEDY)
