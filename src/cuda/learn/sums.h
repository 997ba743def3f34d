/* sums.h - which keys and queries count, and their sums at position 0 about an origin, by a team
 * (team.h). The rules are those of src/cache/moments.c. */
#pragma once

#include "moments.h"
#include "triangle.h"

#define LEARN_SAMPLE 64
#define LEARN_MOST_LENGTH 16.0f          /* times the median squared length of the sample */
#define LEARN_SMALLEST_SCALE 0.00390625f /* of the largest scale */
#define LEARN_TOO_LARGE 9.2e18f

/* What a sub-head's code reads and fills. Arrays are in GPU memory. */
typedef struct learn_input {
    const kvant_cuda_learn_args *args;
    const kvant_cuda_learn_layer *layer;
    uint32_t kv_head, part;
    const float *phases; /* of keys, then of queries: by pair a cosine and a sine */
    /* of keys, then of queries: whether a vector counts, and the vector as it is added */
    uint8_t *counts;
    float *vectors;
} learn_input;

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
        return ((const float *)in->layer->rows)[at];
    return learn_of_half(((const uint16_t *)in->layer->rows)[at]);
}

TEAM_FN float learn_query(const learn_input *in, int query, uint32_t channel)
{
    const kvant_cuda_learn_args *args = in->args;
    const uint32_t token = (uint32_t)query / args->group,
                   head = in->kv_head * args->group + (uint32_t)query % args->group;
    return in->layer
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
    const uint32_t first = kvant_part_channel(args->head_dim, args->part, in->part, p.first),
                   second = kvant_part_channel(args->head_dim, args->part, in->part, p.second);
    const size_t entry = is_key ? (size_t)vector : args->n_rows + (uint32_t)vector / args->group;
    const float *phase = in->phases + 2 * (entry * (args->head_dim / 2) +
                                           in->part * (args->part / 2) + (uint32_t)pair);
    const float a = is_key ? learn_key(in, vector, first) : learn_query(in, vector, first),
                b = is_key ? learn_key(in, vector, second) : learn_query(in, vector, second);
    const learn_two z = { a * phase[0] + b * phase[1], b * phase[0] - a * phase[1] };
    return z;
}

/* Whether a vector has a position. */
TEAM_FN bool learn_is_placed(const learn_input *in, bool is_key, int vector)
{
    const kvant_cuda_learn_args *args = in->args;
    const int32_t *positions = is_key ? args->positions : args->query_positions;
    return !positions || positions[is_key ? vector : (int)((uint32_t)vector / args->group)] >= 0;
}

/* Whether the squares of both numbers are finite. */
TEAM_FN bool learn_is_small(learn_two z)
{
    return fabsf(z.first) < LEARN_TOO_LARGE && fabsf(z.second) < LEARN_TOO_LARGE;
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

/* The sample of a sub-head's keys. */
typedef struct learn_sample {
    float rows[LEARN_SAMPLE][LEARN_MOST + 1], scale[LEARN_MOST], lengths[LEARN_SAMPLE];
} learn_sample;

/* What is known of keys from their sample: vectors of n numbers. A key that is far longer than the
 * sample says nothing about other keys. */
typedef struct learn_rule {
    float *origin, *inverse; /* the mean of the sample; 1 / the scale of each channel */
    float *most;             /* the largest squared length of a key, in scales */
} learn_rule;

TEAM_FN int learn_n_sampled(const kvant_cuda_learn_args *args)
{
    return args->n_rows < LEARN_SAMPLE ? (int)args->n_rows : LEARN_SAMPLE;
}

/* The mean of a channel of the sample, and the root of the largest distance from it. */
TEAM_FN void learn_find_scale(learn_sample *s, int n, int channel, float *origin)
{
    float sum = 0, most = 0, used = 0;
    for (int i = 0; i < n; i++) {
        sum += s->lengths[i] < 0 ? 0 : s->rows[i][channel];
        used += s->lengths[i] < 0 ? 0 : 1.0f;
    }
    const float mean = used > 0 ? sum / used : 0;
    for (int i = 0; i < n; i++)
        most = fmaxf(most, s->lengths[i] < 0 ? 0 : fabsf(s->rows[i][channel] - mean));
    *origin = mean;
    s->scale[channel] = sqrtf(most);
}

/* Whether a length of the sample is the median; below 0 is none. */
TEAM_FN bool learn_is_median(const float *lengths, int n, int at)
{
    int below = 0, used = 0;
    for (int i = 0; i < n; i++) {
        used += lengths[i] >= 0;
        below +=
            lengths[i] >= 0 && (lengths[i] < lengths[at] || (lengths[i] == lengths[at] && i < at));
    }
    return lengths[at] >= 0 && below == used / 2;
}

TEAM_FN float learn_distance(const float *x, const float *origin, const float *inverse, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++) {
        const float z = (x[i] - origin[i]) * inverse[i];
        sum += z * z;
    }
    return sum;
}

TEAM_FN void learn_make_rule(const learn_input *in, learn_sample *s, learn_rule rule)
{
    const int n = (int)in->args->part, pairs = n / 2, n_rows = learn_n_sampled(in->args);
    float largest = 0;
    TEAM_EACH (x, 0, n_rows * pairs) {
        const int row = (int)((uint32_t)(x / pairs) * in->args->n_rows / (uint32_t)n_rows);
        const kvant_cuda_rope_pair p = learn_pair_at(in, x % pairs);
        const learn_two z = learn_load(in, true, row, x % pairs);
        s->rows[x / pairs][p.first] = z.first;
        s->rows[x / pairs][p.second] = z.second;
        if (x % pairs == 0)
            s->lengths[x / pairs] = learn_is_placed(in, true, row) ? 0.0f : -1.0f;
    }
    TEAM_SYNC();
    TEAM_EACH (i, 0, n_rows)
        for (int j = 0; j < n; j++)
            if (!(fabsf(s->rows[i][j]) < LEARN_TOO_LARGE))
                s->lengths[i] = -1;
    TEAM_SYNC();
    TEAM_EACH (i, 0, n)
        learn_find_scale(s, n_rows, i, &rule.origin[i]);
    if (TEAM_IS_FIRST)
        *rule.most = -1; /* no key of the sample has numbers */
    TEAM_SYNC();
    for (int i = 0; i < n; i++)
        largest = fmaxf(largest, s->scale[i]);
    TEAM_EACH (i, 0, n)
        rule.inverse[i] = 1 / fmaxf(s->scale[i], largest > 0 ? largest * LEARN_SMALLEST_SCALE : 1);
    TEAM_SYNC();
    TEAM_EACH (i, 0, n_rows)
        if (s->lengths[i] >= 0)
            s->lengths[i] = learn_distance(s->rows[i], rule.origin, rule.inverse, n);
    TEAM_SYNC();
    TEAM_EACH (i, 0, n_rows)
        if (learn_is_median(s->lengths, n_rows, i))
            *rule.most = LEARN_MOST_LENGTH * s->lengths[i];
    TEAM_SYNC();
}

/* A lane's part of a vector: at most LEARN_MOST / 2 / TEAM_WIDTH pairs. */
typedef struct learn_lane {
    learn_two z[LEARN_MOST / 2 / TEAM_WIDTH];
    float length; /* squared, in scales */
    bool small;
} learn_lane;

TEAM_FN learn_lane learn_read_lane(const learn_input *in, bool is_key, int vector, int lane,
                                   learn_rule rule)
{
    learn_lane l = { { { 0, 0 } }, 0, true };
    for (int k = 0; k < LEARN_MOST / 2 / TEAM_WIDTH; k++) {
        const int pair = lane + k * TEAM_WIDTH;
        if (pair >= (int)in->args->part / 2)
            continue;
        const kvant_cuda_rope_pair p = learn_pair_at(in, pair);
        l.z[k] = learn_load(in, is_key, vector, pair);
        l.small = l.small && learn_is_small(l.z[k]);
        l.z[k].first -= is_key ? rule.origin[p.first] : 0;
        l.z[k].second -= is_key ? rule.origin[p.second] : 0;
        const float x = l.z[k].first * rule.inverse[p.first],
                    y = l.z[k].second * rule.inverse[p.second];
        l.length += x * x + y * y;
    }
    return l;
}

/* Stores a vector as it is added: a key about the origin, or zeros if it does not count. */
TEAM_FN void learn_store_lane(const learn_input *in, float *to, int lane, const learn_lane *l,
                              bool counts)
{
    for (int k = 0; k < LEARN_MOST / 2 / TEAM_WIDTH; k++) {
        const int pair = lane + k * TEAM_WIDTH;
        if (pair >= (int)in->args->part / 2)
            continue;
        const kvant_cuda_rope_pair p = learn_pair_at(in, pair);
        to[p.first] = counts ? l->z[k].first : 0;
        to[p.second] = counts ? l->z[k].second : 0;
    }
}

/* Makes the i-th vector, of keys and then queries. Of a line. */
TEAM_FN void learn_make_vector(const learn_input *in, int i, learn_rule rule)
{
    const bool is_key = i < (int)in->args->n_rows;
    const int vector = is_key ? i : i - (int)in->args->n_rows;
    float *to = in->vectors + (size_t)i * in->args->part;
    bool counts = learn_is_placed(in, is_key, vector);
#ifdef __CUDACC__
    const int lane = (int)threadIdx.x % TEAM_WIDTH;
    learn_lane l = learn_read_lane(in, is_key, vector, lane, rule);
    counts = __all_sync(0xffffffffu, l.small) && counts;
    for (int width = TEAM_WIDTH / 2; width > 0; width /= 2)
        l.length += __shfl_xor_sync(0xffffffffu, l.length, width);
    counts = counts && (!is_key || l.length <= *rule.most);
    learn_store_lane(in, to, lane, &l, counts);
    if (lane == 0)
        in->counts[i] = counts;
#else
    learn_lane l[TEAM_WIDTH];
    for (int lane = 0; lane < TEAM_WIDTH; lane++) {
        l[lane] = learn_read_lane(in, is_key, vector, lane, rule);
        counts = counts && l[lane].small;
    }
    for (int width = TEAM_WIDTH / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            l[lane].length += l[lane + width].length;
    counts = counts && (!is_key || l[0].length <= *rule.most);
    for (int lane = 0; lane < TEAM_WIDTH; lane++)
        learn_store_lane(in, to, lane, &l[lane], counts);
    in->counts[i] = counts;
#endif
}
