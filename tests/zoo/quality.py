"""Classifiers that are wrong in ways people have shipped."""

import numpy as np

from littlelm_core.curation import QualityClassifier


class Shuffled(QualityClassifier):
    """Starts from random weights that nobody seeded."""

    def fit(self, good, bad, **keys):
        self.weights = np.random.default_rng().normal(0, 0.01, len(self.weights))
        return super().fit(good, bad, **keys)


class Backwards(QualityClassifier):
    def fit(self, good, bad, **keys):
        return super().fit(bad, good, **keys)


class CountsTexts(QualityClassifier):
    """Each text weighs the same, so that the larger class decides."""

    def fit(self, good, bad, **keys):
        losses = super().fit(good, bad, **keys)
        self.bias += float(np.log(len(good) / len(bad)))
        return losses


class SingleWords(QualityClassifier):
    """Takes `ngrams` and forgets it."""

    def features(self, texts):
        bucket, text = super().features(texts)
        counts = np.array([len(t.split()) for t in texts], np.int64)
        return bucket[: counts.sum()], text[: counts.sum()]


class SumsWeights(QualityClassifier):
    """The sum over the words: a long text is good, or bad, without doubt."""

    def scores(self, texts):
        bucket, text = self.features(texts)
        total = np.bincount(text, self.weights[bucket], len(texts)) / 30
        return 1 / (1 + np.exp(-(total + self.bias)))


class NeighborsMatter(QualityClassifier):
    """Divides by the mean length of the batch."""

    def scores(self, texts):
        bucket, text = self.features(texts)
        total = np.bincount(text, self.weights[bucket], len(texts))
        mean = len(bucket) / max(len(texts), 1)
        return 1 / (1 + np.exp(-(total / max(mean, 1) + self.bias)))


class ForgetsTheBias(QualityClassifier):
    @classmethod
    def load(cls, path):
        model = QualityClassifier.load(path)
        model.bias = model.bias + 0.3 if model.bias >= 0 else 0.0
        return model


class AnyVersion(QualityClassifier):
    VERSION = 2

    @classmethod
    def load(cls, path):
        try:
            return super().load(path)
        except ValueError:
            cls.VERSION = 1
            return super().load(path)
        finally:
            cls.VERSION = 2


class TakesOneClass(QualityClassifier):
    def fit(self, good, bad, **keys):
        return super().fit(good or ["x"], bad or ["y"], **keys)


ZOO = {
    "unseeded start": (Shuffled, "test_training_twice_gives_the_same_bits"),
    "labels swapped": (Backwards, "test_it_learns_and_is_right_on_new_texts"),
    "the larger class decides": (CountsTexts, "test_classes_weigh_the_same"),
    "single words": (SingleWords, "test_pairs_of_words_are_features"),
    "sums for means": (SumsWeights, "test_length_does_not_decide"),
    "neighbors matter": (NeighborsMatter, "test_a_score_is_of_one_text"),
    "bias lost": (ForgetsTheBias, "test_save_and_load"),
    "any version": (AnyVersion, "test_files_that_are_none_are_refused"),
    "one class is enough": (TakesOneClass, "test_wrong_input_is_refused"),
}
