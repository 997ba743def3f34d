"""Masks of the attention implementation "kvant": which masks stay two numbers. All remaining masks
equal the masks of transformers.
"""

import unittest

import models
import torch
from common import TestCase
from transformers import masking_utils as theirs

from kvant.transformers import mask
from kvant.transformers.masks import Shape, guarded, plain, window_of

BLOCKS = torch.tensor([[-1] * 4 + [0] * 5 + [-1] * 11])
SHORT = {  # window: its name in a Shape
    0: theirs.causal_mask_function,
    5: theirs.sliding_window_causal_mask_function(5),
}
WHOLE = {
    "chunks": theirs.chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int64)),
    "images": theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS)),
    "packed": theirs.and_masks(
        theirs.causal_mask_function, theirs.packed_sequence_mask_function(BLOCKS)
    ),
    "packed and a window": theirs.and_masks(SHORT[5], theirs.packed_sequence_mask_function(BLOCKS)),
    "two windows": theirs.and_masks(theirs.sliding_window_overlay(9), SHORT[5]),
    "a window on one side": theirs.sliding_window_overlay(5),
    "both directions": theirs.bidirectional_mask_function,
    "a window in both": theirs.sliding_window_bidirectional_mask_function(3),
    "a function of nobody's": lambda batch, head, q, kv: (kv <= q) & (kv % 2 == 0),
}


def options(function, q_length=20, kv_length=20, attention_mask=None):
    made = dict(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=kv_length - q_length,
        mask_function=function,
    )
    return made | dict(
        attention_mask=attention_mask, device="cpu", config=None, dtype=torch.float32
    )


def made(function, q_length=20, kv_length=20, attention_mask=None, batch=1):
    given = options(function, q_length, kv_length, attention_mask)
    return [
        mask(batch, allow_is_causal_skip=True, **given),
        theirs.sdpa_mask(batch, allow_is_causal_skip=False, **given),
    ]


class Masks(TestCase):
    def test_causal_masks_and_windows_are_numbers(self):
        for window, function in SHORT.items():
            self.assertEqual(window_of(function), window)
            ours, _ = made(function, 3)
            self.assertEqual((ours.shape, ours.kvant), ((1, 20), Shape(window, (0,), False)))

    def test_padding(self):
        padding = torch.ones(3, 20, dtype=torch.bool)
        padding[0, :4], padding[1, 5:7], padding[2, :] = False, False, False
        ours, _ = made(SHORT[5], attention_mask=padding, batch=3)
        self.assertTrue(torch.equal(ours, padding))
        self.assertEqual(ours.kvant, Shape(5, (4, 0, 20), True))
        self.assertEqual(made(SHORT[0], attention_mask=padding[:1])[0].kvant, Shape(0, (4,), False))
        short, wanted = made(SHORT[0], 1, 20, padding[:1, :15])  # shorter than the cache
        self.assertTrue(torch.equal(short, wanted))

    def test_all_others_are_whole(self):
        for name, function in WHOLE.items():
            self.assertIsNone(window_of(function), name)
            for q_length in (20, 1):
                for padding in (None, torch.arange(20)[None] >= 2):
                    ours, wanted = made(function, q_length, 20, padding)
                    self.assertTrue(torch.equal(ours, wanted), name)

    def test_a_mask_is_no_numbers(self):
        """Attention inside of a model that adds its mask to scores, inverts the mask or fills with
        it is an error. A mask may be cut, copied and joined, and is then the mask of transformers.
        """
        scores, hidden = torch.zeros(1, 4, 20, 20), torch.zeros(1, 1, 20, 20, dtype=torch.bool)
        for name, function in {**SHORT, **WHOLE}.items():
            ours, wanted = guarded(1, **options(function)), made(function)[1]
            self.assertEqual(ours.shape, wanted.expand(1, 1, 20, 20).shape)
            for use in (
                lambda: scores + ours,
                lambda: scores.add_(ours),
                lambda: scores.masked_fill(ours, 1.0),
                lambda: ours.masked_fill(hidden, False),
                lambda: torch.where(ours, 0.0, 1.0),
                lambda: (1.0 - ours.to(torch.float32)) * -1e4,
                lambda: ours.bool().float(),
                lambda: ours.to(torch.bool) * 1.0,
                lambda: torch.cat([ours, scores[:, :1]], -1),
                lambda: scores.__setitem__((slice(None), slice(0, 1)), ours),
                lambda: torch.nn.functional.scaled_dot_product_attention(
                    scores, scores, scores, attn_mask=ours
                ),
                lambda: ours.float() if name else ours[:, :, :, :5] * 2,
            ):
                self.refused(
                    ValueError,
                    'attn_implementation="kvant"|this model computes attention itself',
                    use,
                )
            for joined, right in (
                (ours[..., 3:], wanted[..., 3:]),
                (ours[:, :, -2:, :5], wanted[:, :, -2:, :5]),
                (ours & ~hidden, wanted & ~hidden),
                (ours | ours, wanted),
                (torch.cat([ours, ours], -1), torch.cat([wanted, wanted], -1)),
            ):
                self.assertTrue(torch.equal(plain(joined)[0], right), name)
            for copied in (ours, ours.to("cpu"), ours.clone(), ours.contiguous(), ours.detach()):
                self.assertEqual(plain(copied)[1], plain(ours)[1])

    def test_packed_sequences_do_not_see_each_other(self):
        stock, ours = models.twins("llama", "eager", "kvant")
        tokens, position = models.prompt(30, 1, 0)[0], torch.arange(30)[None] % 12
        with torch.no_grad():
            got, wanted, whole = (
                model(tokens, position_ids=p, use_cache=False).logits
                for model, p in ((ours, position), (stock, position), (stock, None))
            )
        self.assertTrue(torch.allclose(got, wanted, rtol=0, atol=1e-4 * wanted.abs().max()))
        self.assertFalse(torch.allclose(got, whole, rtol=0, atol=1e-2 * wanted.abs().max()))

    def test_a_chunked_model(self):
        """In Llama 4 most layers see only their chunk. Every fourth layer sees everything and has
        no positions.
        """
        given = dict(
            attention_chunk_size=16, num_local_experts=2, intermediate_size_mlp=128, pad_token_id=0
        )
        models.KINDS["llama4_text"] = given
        try:
            stock, ours = models.twins("llama4_text", "eager", "kvant")
        finally:
            del models.KINDS["llama4_text"]
        from test_transformers import exact, generate

        self.assertEqual(generate(ours, cache=exact(ours)).tolist(), generate(stock).tolist())


if __name__ == "__main__":
    unittest.main()
