/* sums.h - which keys and queries count, and their sums at position 0 about an origin, by a team
 * (team.h). The rules are those of src/cache/moments.c. */
#pragma once

#include "triangle.h"

#define LEARN_SAMPLE 64
#define LEARN_MOST_LENGTH 16.0f          /* times the median squared length of the sample */
#define LEARN_SMALLEST_SCALE 0.00390625f /* of the largest scale */
#define LEARN_TOO_LARGE 9.2e18f

/* What a sub-head's code reads and fills. Arrays are in GPU memory. */
typedef struct learn_input {
    const kvant_cuda_learn_args *args;
    uint32_t kv_head, part;
    const float *phases; /* of keys, then of queries: by pair a cosine and a sine */
    uint8_t *counts;     /* of keys, then of queries: whether a vector counts */
} learn_input;

/* The channel of a head that is channel i of a part, as kvant_part_channel. */
TEAM_FN uint32_t learn_channel(const kvant_cuda_learn_args *args, uint32_t part, uint32_t i)
{
    const uint32_t half = args->part / 2;
    return i < half ? part * half + i : args->head_dim / 2 + part * half + i - half;
}

TEAM_FN int learn_n_queries(const kvant_cuda_learn_args *args)
{
    return (int)(args->n_tokens * args->group);
}

TEAM_FN float learn_key(const learn_input *in, int row, uint32_t channel)
{
    const kvant_cuda_learn_args *args = in->args;
    const size_t at = (args->places ? args->places[row] : (size_t)row) * args->token_stride +
                      in->kv_head * args->head_stride + channel;
    if (args->type == KVANT_CUDA_F32)
        return ((const float *)args->rows)[at];
    return learn_of_half(((const uint16_t *)args->rows)[at]);
}

TEAM_FN float learn_query(const learn_input *in, int query, uint32_t channel)
{
    const kvant_cuda_learn_args *args = in->args;
    const uint32_t token = (uint32_t)query / args->group,
                   head = in->kv_head * args->group + (uint32_t)query % args->group;
    return args
        ->queries[token / args->batch_tokens][token % args->batch_tokens * args->query_stride +
                                              (size_t)head * args->head_dim + channel];
}

TEAM_FN kvant_cuda_rope_pair learn_pair_at(const learn_input *in, int i)
{
    return in->args->pairs[in->part * (in->args->part / 2) + (uint32_t)i];
}

/* A pair of channels of a key (or of a query) at position 0. */
typedef struct learn_two {
    float first, second;
} learn_two;

TEAM_FN learn_two learn_load(const learn_input *in, bool is_key, int vector, int pair)
{
    const kvant_cuda_learn_args *args = in->args;
    const kvant_cuda_rope_pair p = learn_pair_at(in, pair);
    const uint32_t first = learn_channel(args, in->part, p.first),
                   second = learn_channel(args, in->part, p.second);
    const size_t entry = is_key ? (size_t)vector : args->n_rows + (uint32_t)vector / args->group;
    const float *phase = in->phases + 2 * (entry * (args->head_dim / 2) +
                                           in->part * (args->part / 2) + (uint32_t)pair);
    const float a = is_key ? learn_key(in, vector, first) : learn_query(in, vector, first),
                b = is_key ? learn_key(in, vector, second) : learn_query(in, vector, second);
    const learn_two z = { a * phase[0] + b * phase[1], b * phase[0] - a * phase[1] };
    return z;
}

/* Whether a vector has a position, and numbers whose squares are finite. */
TEAM_FN bool learn_is_usable(const learn_input *in, bool is_key, int vector)
{
    const kvant_cuda_learn_args *args = in->args;
    const int32_t *positions = is_key ? args->positions : args->query_positions;
    const int at = is_key ? vector : (int)((uint32_t)vector / args->group);
    bool usable = !positions || positions[at] >= 0;
    for (uint32_t i = 0; i < args->part; i++) {
        const uint32_t channel = learn_channel(args, in->part, i);
        const float x = is_key ? learn_key(in, vector, channel) : learn_query(in, vector, channel);
        usable = usable && fabsf(x) < LEARN_TOO_LARGE;
    }
    return usable;
}

/* Cosine and sine of an entry's position times a pair's frequency. */
TEAM_FN void learn_phase(const kvant_cuda_learn_args *args, int entry, int pair, float *phase)
{
    const bool is_key = entry < (int)args->n_rows;
    const int32_t *positions = is_key ? args->positions : args->query_positions;
    const int32_t position = positions ? positions[is_key ? entry : entry - (int)args->n_rows] : 0;
    const learn_complex z =
        learn_unit(position > 0 ? (double)position * args->pairs[pair].frequency : 0);
    phase[0] = (float)z.re;
    phase[1] = (float)z.im;
}

/* Working memory of the choice: `vectors` n numbers each. */
typedef struct learn_choice_space {
    float origin[LEARN_MOST], scale[LEARN_MOST], lengths[LEARN_SAMPLE], most;
    uint32_t counted[LEARN_SAMPLE];
} learn_choice_space;

/* The row of the sample's i-th key. */
TEAM_FN int learn_sampled(const kvant_cuda_learn_args *args, int i)
{
    const uint32_t n = args->n_rows;
    return n < LEARN_SAMPLE ? i : (int)((uint32_t)i * n / LEARN_SAMPLE);
}

TEAM_FN int learn_n_sampled(const kvant_cuda_learn_args *args)
{
    return args->n_rows < LEARN_SAMPLE ? (int)args->n_rows : LEARN_SAMPLE;
}

/* The mean of the sample, and a scale of each channel: the root of the largest distance from the
 * mean. */
TEAM_FN void learn_find_scales(const learn_input *in, learn_choice_space *s)
{
    const kvant_cuda_learn_args *args = in->args;
    const int n = learn_n_sampled(args);
    TEAM_EACH(i, 0, (int)args->part / 2)
    {
        const kvant_cuda_rope_pair p = learn_pair_at(in, i);
        float first = 0, second = 0, most_first = 0, most_second = 0, all = 0;
        for (int k = 0; k < n; k++) {
            const int row = learn_sampled(args, k);
            const learn_two z = learn_load(in, true, row, i);
            const bool usable = in->counts[row];
            first += usable ? z.first : 0;
            second += usable ? z.second : 0;
            all += usable ? 1.0f : 0;
        }
        first = all > 0 ? first / all : 0;
        second = all > 0 ? second / all : 0;
        for (int k = 0; k < n; k++) {
            const int row = learn_sampled(args, k);
            const learn_two z = learn_load(in, true, row, i);
            if (!in->counts[row])
                continue;
            most_first = fmaxf(most_first, fabsf(z.first - first));
            most_second = fmaxf(most_second, fabsf(z.second - second));
        }
        s->origin[p.first] = first;
        s->origin[p.second] = second;
        s->scale[p.first] = sqrtf(most_first);
        s->scale[p.second] = sqrtf(most_second);
    }
}

/* The squared length of a key about the origin, in scales. */
TEAM_FN float learn_length(const learn_input *in, const learn_choice_space *s, int row, float least)
{
    const kvant_cuda_learn_args *args = in->args;
    float sum = 0;
    for (int i = 0; i < (int)args->part / 2; i++) {
        const kvant_cuda_rope_pair p = learn_pair_at(in, i);
        const learn_two z = learn_load(in, true, row, i);
        const float x = (z.first - s->origin[p.first]) / fmaxf(s->scale[p.first], least),
                    y = (z.second - s->origin[p.second]) / fmaxf(s->scale[p.second], least);
        sum += x * x + y * y;
    }
    return sum;
}

/* The largest squared length of a key that counts, from those of the sample; below 0 is no key of
 * the sample. */
TEAM_FN float learn_limit(float *lengths, int n)
{
    int used = 0;
    for (int i = 0; i < n; i++) {
        const float x = lengths[i];
        int j = used;
        if (!(x >= 0))
            continue;
        for (; j > 0 && x < lengths[j - 1]; j--)
            lengths[j] = lengths[j - 1];
        lengths[j] = x;
        used++;
    }
    return used ? LEARN_MOST_LENGTH * lengths[used / 2] : -1;
}

TEAM_FN void learn_count(const uint8_t *flags, int n, learn_choice_space *s, uint32_t *count)
{
    TEAM_EACH(i, 0, LEARN_SAMPLE)
    {
        uint32_t counted = 0;
        for (int k = i; k < n; k += LEARN_SAMPLE)
            counted += flags[k];
        s->counted[i] = counted;
    }
    TEAM_SYNC();
    if (TEAM_IS_FIRST) {
        *count = 0;
        for (int i = 0; i < LEARN_SAMPLE; i++)
            *count += s->counted[i];
    }
    TEAM_SYNC();
}

/* Finds the origin of a sub-head, and which keys and queries count; counts: how many these are.
 * A key far longer than the sample says nothing about other keys. */
TEAM_APART void learn_choose(const learn_input *in, learn_choice_space *s, float *origin,
                             uint32_t *counts)
{
    const kvant_cuda_learn_args *args = in->args;
    const int n_rows = (int)args->n_rows, n_queries = learn_n_queries(args),
              n_sampled = learn_n_sampled(args);
    float least = 0;
    TEAM_EACH(i, 0, n_rows + n_queries)
    in->counts[i] = learn_is_usable(in, i < n_rows, i < n_rows ? i : i - n_rows);
    TEAM_SYNC();
    learn_find_scales(in, s);
    TEAM_SYNC();
    for (int i = 0; i < (int)args->part; i++)
        least = fmaxf(least, s->scale[i]);
    least = least > 0 ? least * LEARN_SMALLEST_SCALE : 1;
    TEAM_EACH(i, 0, n_sampled)
    {
        const int row = learn_sampled(args, i);
        s->lengths[i] = in->counts[row] ? learn_length(in, s, row, least) : -1;
    }
    TEAM_EACH(i, 0, (int)args->part)
    origin[i] = s->origin[i];
    TEAM_SYNC();
    if (TEAM_IS_FIRST)
        s->most = learn_limit(s->lengths, n_sampled);
    TEAM_SYNC();
    TEAM_EACH(i, 0, n_rows)
    in->counts[i] = in->counts[i] && learn_length(in, s, i, least) <= s->most;
    TEAM_SYNC();
    learn_count(in->counts, n_rows, s, &counts[0]);
    learn_count(in->counts + n_rows, n_queries, s, &counts[1]);
}

/* A pair of a vector as it is added: a key about the origin; zeros if it does not count. */
TEAM_FN learn_two learn_addend(const learn_input *in, bool is_key, int vector, int pair,
                               const float *origin)
{
    const kvant_cuda_learn_args *args = in->args;
    const kvant_cuda_rope_pair p = learn_pair_at(in, pair);
    learn_two z = { 0, 0 };
    if (in->counts[is_key ? vector : (int)args->n_rows + vector]) {
        z = learn_load(in, is_key, vector, pair);
        z.first -= is_key ? origin[p.first] : 0;
        z.second -= is_key ? origin[p.second] : 0;
    }
    return z;
}
