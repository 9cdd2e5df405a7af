"""MinHash as people write it on a first try."""

import numpy as np

from littlelm_core.curation import MinHash


class Ungoverned(MinHash):
    """Rounds the rows down where bands do not divide the permutations."""

    def __post_init__(self):
        pass


class OnePermutation(MinHash):
    """Every permutation has the same parameters."""

    def signatures(self, texts):
        return np.repeat(super().signatures(texts)[:, :1], self.permutations, axis=1)


class ShiftsOnly(MinHash):
    """h + b_k: the numbers move, the order hardly changes."""

    def signatures(self, texts):
        hashes, offsets = self.shingles(texts)
        small = (hashes >> np.uint64(32)).astype(np.uint32)
        shift = np.random.RandomState(self.seed).randint(0, 99, self.permutations)
        rows = [small + s for s in shift.astype(np.uint32)]
        if not len(texts):
            return super().signatures(texts)
        return np.stack([np.minimum.reduceat(r, offsets[:-1]) for r in rows], axis=1)


class ByCharacter(MinHash):
    """Keeps marks and case: the same text, copied from a page, is another."""

    def shingles(self, texts):
        return super().shingles([self._spell(text) for text in texts])

    def _spell(self, text):
        if len(text.split()) < self.shingle:
            return text
        return " ".join("x".join(str(ord(c)) for c in word) for word in text.split())


class BagOfWords(MinHash):
    """Single words instead of shingles."""

    def shingles(self, texts):
        return super().shingles([" ".join(sorted(text.split())) for text in texts])


class CrossesTexts(MinHash):
    """Shingles run on into the next text of the batch."""

    def signatures(self, texts):
        shifted = [
            text + " " + " ".join(after.split()[: self.shingle - 1])
            for text, after in zip(texts, [*texts[1:], ""], strict=True)
        ]
        return super().signatures(shifted)


class CutsLongTexts(MinHash):
    def signatures(self, texts):
        return super().signatures([text[:100_000] for text in texts])


class EmptyForShort(MinHash):
    """A text without shingles has the signature of the empty set."""

    def signatures(self, texts):
        signatures = super().signatures(texts)
        for i, text in enumerate(texts):
            if len(text.split()) < self.shingle:
                signatures[i] = 2**32 - 1
        return signatures


class SumsRows(MinHash):
    """A band's key is the sum of its rows."""

    def band_keys(self, signatures):
        rows = signatures.reshape(len(signatures), self.bands, self.rows)
        return rows.sum(2, dtype=np.uint64)


class FewerRows(MinHash):
    """Uses half of the rows of a band: twice as many candidates."""

    def band_keys(self, signatures):
        signatures = signatures.copy()
        rows = signatures.reshape(len(signatures), self.bands, self.rows)
        rows[:, :, self.rows // 2 :] = 0
        return super().band_keys(signatures)


class SameSeed(MinHash):
    def signatures(self, texts):
        fixed = MinHash(self.permutations, self.bands, self.shingle, seed=1)
        return fixed.signatures(texts)


class SmallHash(MinHash):
    """Sixteen bits of hash for a shingle."""

    def shingles(self, texts):
        hashes, offsets = super().shingles(texts)
        return hashes & np.uint64(0xFFFF << 48), offsets


class CountsTwice(MinHash):
    def shingle_sets(self, texts):
        hashes, offsets = self.shingles(texts)
        return [np.sort(part) for part in np.split(hashes, offsets[1:-1])]


ZOO = {
    "bands that do not divide": (Ungoverned, "test_settings_by_default_and_refused"),
    "one permutation": (OnePermutation, "test_agreement_estimates_the_similarity"),
    "shifts for permutations": (
        ShiftsOnly,
        "test_bands_meet_with_the_promised_probability",
    ),
    "marks and case": (ByCharacter, "test_case_marks_and_wrapping_do_not_matter"),
    "a bag of words": (BagOfWords, "test_case_marks_and_wrapping_do_not_matter"),
    "shingles across texts": (CrossesTexts, "test_neighbors_do_not_matter"),
    "long texts cut": (CutsLongTexts, "test_a_long_text_is_one_text"),
    "short texts are empty": (EmptyForShort, "test_short_texts_are_whole_or_different"),
    "keys are sums": (SumsRows, "test_a_key_is_its_band_and_no_more"),
    "half of the rows": (FewerRows, "test_bands_meet_with_the_promised_probability"),
    "the seed is ignored": (SameSeed, "test_seeds_are_different_permutations"),
    "16-bit hashes": (SmallHash, "test_small_differences_of_words_count"),
    "lists for sets": (CountsTwice, "test_shingle_sets_are_the_sets"),
}
