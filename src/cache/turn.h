/* turn.h - RoPE, as transform=first knows it (kvant_rope). What is learnt are sums over keys and queries
 * turned back to position 0. Moments at other positions are means over a range of them. */
#pragma once

#include "tensor.h"

/* Ranges are runs of octaves: [0, 1024), [1024, 2048), [2048, 4096) ... Each octave of a range counts as
 * much as the others, however long. */
#define KVANT_FIRST_OCTAVE 1024u
#define KVANT_MOST_OCTAVES 22u /* of 2^31 positions */

typedef struct kvant_range {
    uint8_t first, end; /* octaves; end 0: none */
} kvant_range;

/* Two channels of a part (weights.h) that turn together. Channels that do not turn make pairs of
 * frequency 0. */
typedef struct kvant_pair {
    uint16_t first, second;
    float frequency;
} kvant_pair;

typedef struct kvant_turn {
    uint32_t n_dims, interleaved, n_positions, n_ranges,
        block_centers; /* as in kvant_rope, with n_positions resolved */
    uint32_t part, n_octaves;
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_pair pairs[KVANT_MAX_HEAD_DIM / 2]; /* of part 0, then of part 1 ... */
} kvant_turn;

/* Of any angle; the same bits everywhere. */
void kvant_turn_sin_cos(double angle, double *sine, double *cosine);

/* Pairs of a whole head, by channel: head_dim / 2. False when a channel is left alone. */
bool kvant_turn_pairs(const kvant_rope *rope, uint32_t head_dim, kvant_pair *pairs);

/* KVANT_ERR_ARGUMENT, KVANT_ERR_NONFINITE. */
kvant_status kvant_rope_check(const kvant_rope *rope, uint32_t head_dim);

/* How many octaves so many positions have. */
uint32_t kvant_turn_octaves(uint64_t n_positions);

uint32_t kvant_turn_octave(const kvant_turn *turn, int32_t position);

/* Its first position, and the one behind its last. */
void kvant_turn_octave_edges(const kvant_turn *turn, uint32_t octave, int32_t edges[2]);

/* Turns vectors of one part. Steps of equal size from vector to vector cost no sines. */
typedef struct kvant_turning {
    const kvant_pair *pairs; /* NULL: nothing turns */
    uint32_t n;
    bool halves; /* pair i is channels i and i + n */
    int64_t position, step;
    struct {
        double cosine[KVANT_MAX_HEAD_DIM / 2], sine[KVANT_MAX_HEAD_DIM / 2]; /* per pair */
    } at, by; /* of the position, of the step */
    float cosine[KVANT_MAX_HEAD_DIM / 2], sine[KVANT_MAX_HEAD_DIM / 2]; /* of the position */
} kvant_turning;

/* turn NULL: kvant_turn_back does nothing. kvant_turning_over: of n pairs of a vector of 2 n channels. */
void kvant_turning_begin(kvant_turning *turning, const kvant_turn *turn, uint32_t part);
void kvant_turning_over(kvant_turning *turning, const kvant_pair *pairs, uint32_t n);

/* The next steps will be so many positions, whose cosines and sines of all pairs these are. */
void kvant_turning_expect(kvant_turning *turning, int64_t step, const double *cosine,
                          const double *sine);

/* turning->cosine and sine become those of the position. */
void kvant_turning_move(kvant_turning *turning, int64_t position);

/* x at a position becomes what it is at position 0; below 0: what x at 0 is at -position. */
void kvant_turn_back(kvant_turning *turning, int64_t position, float *x);

/* A mean (NULL: none) and a full matrix of second moments about 0, of vectors of one part at position
 * 0, become those over every step-th position of a range. KVANT_ERR_MEMORY. */
kvant_status kvant_turn_moments(const kvant_turn *turn, uint32_t part, kvant_range range,
                                uint32_t step, double *mean, double *moments);

/* Such a mean, over positions first to last. KVANT_ERR_MEMORY. */
kvant_status kvant_turn_mean(const kvant_turn *turn, uint32_t part, int32_t first, int32_t last,
                             double *mean);
