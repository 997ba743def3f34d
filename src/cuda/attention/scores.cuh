/* scores.cuh - changes scores before the softmax: softcap, ALiBi, mask, causality, window.
 *
 * Scores are binary logarithms in the registers of an accumulator (softmax.cuh). Lane l holds
 * tokens 16i + l / 4 of a page and the tokens 8 further. It holds columns 2 (l mod 4) of a tile and
 * the columns after them. A hidden token gets the score -infinity, so its weight is 0. */
#pragma once

#include "query.cuh"

namespace kvant
{

/* Every column of a pair sees tokens from .. to. Pages inside this range need no test per token. */
struct Seen {
    int from, to;
};

KVANT_INLINE Seen seen_by_all(const AttentionArgs &p, const Pair &pair, int first_position)
{
    const int first = first_position + column_of<true>(p, pair, 0).token,
              last = first_position + column_of<true>(p, pair, max(pair.n_columns - 1, 0)).token;
    return Seen{ p.window == INT_MAX ? 0 : last - p.window + 1, p.causal ? first : INT_MAX };
}

/* cap * tanh(x / cap), within 2^-20 of cap. */
KVANT_INLINE float soften(float x, float cap)
{
    const float e = exp2_fast(x * __fdividef(2 * LOG2_E, cap));
    return cap - __fdividef(2 * cap, e + 1);
}

/* Softcap, then mask or ALiBi. first is the position of the page's first token; the page has
 * `valid` tokens, and the mask has no cells beyond them. */
template <class Q, int N>
KVANT_INLINE void add_bias(const AttentionArgs &p, const Q &tile, int t, int first, int valid,
                           int lane, float (&s)[N][4])
{
    unrolled_for (int h = 0; h < 2; h++) {
        const int column = 8 * t + 2 * (lane & 3) + h;
        const float slope = tile.slope[column];
        const uint16_t *mask = p.mask + tile.mask_row[column];
        unrolled_for (int i = 0; i < 2 * N; i++) {
            float &x = s[i / 2][2 * (i & 1) + h];
            const int in_page = 16 * (i / 2) + 8 * (i & 1) + (lane >> 2), token = first + in_page;
            if (p.softcap_log2 > 0)
                x = soften(x, p.softcap_log2);
            if (p.mask)
                x += in_page < valid ? slope * __half2float(__ushort_as_half(__ldg(mask + token)))
                                     : 0;
            else if (p.max_bias > 0)
                x += slope * (float)(token - tile.position[column]);
        }
    }
}

template <class Q, int N>
KVANT_INLINE void hide_unseen(const AttentionArgs &p, const Q &tile, int t, int first, int lane,
                              float (&s)[N][4])
{
    unrolled_for (int h = 0; h < 2; h++) {
        const int position = tile.position[8 * t + 2 * (lane & 3) + h];
        unrolled_for (int i = 0; i < 2 * N; i++) {
            const int token = first + 16 * (i / 2) + 8 * (i & 1) + (lane >> 2);
            if ((p.causal && token > position) || position - token >= p.window)
                s[i / 2][2 * (i & 1) + h] = -INFINITY;
        }
    }
}

/* Changes the scores of a page, or of 16 N of its tokens. */
template <class Q, int N>
KVANT_INLINE void change_scores(const AttentionArgs &p, const Q &tile, const Seen &seen, int t,
                                int first, int valid, int lane, float (&s)[N][4])
{
    if (p.softcap_log2 > 0 || p.mask || p.max_bias > 0)
        add_bias(p, tile, t, first, valid, lane, s);
    if (first < seen.from || first + 16 * N - 1 > seen.to)
        hide_unseen(p, tile, t, first, lane, s);
}

} // namespace kvant
