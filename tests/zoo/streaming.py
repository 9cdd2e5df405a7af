"""Streams of text that are wrong in ways people have shipped."""

from littlelm_core.generate import generate, stream, stream_text


def _ids(model, tokenizer, prompt, count, settings, specials=True):
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    stop = tokenizer.special_ids.values() if specials else ()
    return stream(model, ids, count, stop=stop, **settings)


def _decodes_each_token(model, tokenizer, prompt, count, stop=(), **settings):
    for id_ in _ids(model, tokenizer, prompt, count, settings):
        yield tokenizer.decode([id_])


def _loses_the_rest(model, tokenizer, prompt, count, stop=(), **settings):
    """The decoder is never flushed."""
    decoder = tokenizer.stream()
    for id_ in _ids(model, tokenizer, prompt, count, settings):
        yield decoder.push(id_)


def _no_stream(model, tokenizer, prompt, count, stop=(), **settings):
    return iter(
        ["".join(stream_text(model, tokenizer, prompt, count, stop, **settings))]
    )


def _goes_on_after_specials(model, tokenizer, prompt, count, stop=(), **settings):
    decoder = tokenizer.stream()
    for id_ in _ids(model, tokenizer, prompt, count, settings, specials=False):
        yield decoder.push(id_)
    yield decoder.flush()


def _without_bos(model, tokenizer, prompt, count, stop=(), **settings):
    ids = tokenizer.encode(prompt) or [0]
    yield tokenizer.decode(generate(model, ids, count, **settings))


def _specials_in_the_prompt(model, tokenizer, prompt, count, stop=(), **settings):
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt, allowed_special="all")]
    yield tokenizer.decode(generate(model, ids, count, **settings))


def _stops_within_a_piece_only(model, tokenizer, prompt, count, stop=(), **settings):
    for piece in stream_text(model, tokenizer, prompt, count, **settings):
        if any(s and s in piece for s in stop):
            return
        yield piece


def _shows_then_stops(model, tokenizer, prompt, count, stop=(), **settings):
    shown = ""
    for piece in stream_text(model, tokenizer, prompt, count, **settings):
        shown += piece
        yield piece
        if any(s and s in shown for s in stop):
            return


def _holds_for_ever(model, tokenizer, prompt, count, stop=(), **settings):
    """What is held back at the end is lost."""
    longest = max((len(s) for s in stop), default=1)
    held = ""
    for piece in stream_text(model, tokenizer, prompt, count, **settings):
        held += piece
        found = [held.index(s) for s in stop if s and s in held]
        if found:
            yield held[: min(found)]
            return
        yield held[: max(0, len(held) - longest + 1)]
        held = held[max(0, len(held) - longest + 1) :]


def _checks_late(model, tokenizer, prompt, count, stop=(), **settings):
    yield from stream_text(model, tokenizer, prompt, count, stop, **settings)


ZOO = {
    "each token is decoded alone": (_decodes_each_token, "test_no_half_characters"),
    "the decoder is not flushed": (
        _loses_the_rest,
        "test_what_is_cut_comes_out_at_the_end",
    ),
    "all at once": (_no_stream, "test_it_streams"),
    "goes on after a special token": (
        _goes_on_after_specials,
        "test_a_special_token_ends_the_text",
    ),
    "no BOS": (_without_bos, "test_a_prompt_stands_behind_bos"),
    "specials in the prompt": (
        _specials_in_the_prompt,
        "test_special_spellings_in_a_prompt_are_text",
    ),
    "a stop over two pieces is missed": (_stops_within_a_piece_only, "test_stop_texts"),
    "the stop is shown first": (
        _shows_then_stops,
        "test_text_that_may_become_a_stop_is_held_back",
    ),
    "the end is held back for ever": (_holds_for_ever, "test_stop_texts"),
    "settings are checked at the first piece": (
        _checks_late,
        "test_wrong_settings_raise_at_once",
    ),
}
