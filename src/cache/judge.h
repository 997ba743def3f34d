/* judge.h - what learn.c keeps, and the sample of rows and queries by which versions are judged (judge.c). */
#pragma once

#include "learn.h"
#include "turn.h"

#define SAMPLE_ROWS 64u    /* of a batch, by which versions are judged */
#define SAMPLE_QUERIES 32u /* per kv head, likewise: those noted last */
#define FEWEST_ROWS 16u    /* that are worth an estimate */

typedef struct unit_sums {
    uint32_t n_keys, n_queries, n_noted;
    float *key;  /* sum of keys less the origin */
    float *keys; /* lower triangles of sums of outer products, as the next two */
    float *queries;
    float *noted; /* queries since the last judgement */
} unit_sums;

typedef struct kvant_learning {
    uint32_t part, n_units; /* channels of a unit; units of all kv heads */
    uint32_t n_rows, n_rows_before; /* in the sample, now and before the last write */
    uint32_t *n_queries;    /* ever put into the sample, per kv head */
    uint32_t stamp;         /* of the version that the sums belong to */
    uint32_t due;           /* keys that the next matrix waits for */
    bool done;              /* enough was seen */
    float *rows;            /* SAMPLE_ROWS x width */
    float *queries;         /* SAMPLE_QUERIES x head_dim per kv head */
    float *origin;          /* width */
    float *sums;            /* the units' arrays */
    double *costs;          /* of a version and of another, per kv head */
    unit_sums *units;
    kvant_turn *turn;       /* or NULL, as what follows */
    kvant_range ranges[KVANT_MOST_OCTAVES]; /* of the version from these sums for each octave, if there is one */
    uint32_t kin;           /* versions from these sums have the same */
    int32_t places[SAMPLE_ROWS]; /* positions of rows of the sample */
    int32_t *asked;         /* those of its queries */
    const int32_t *positions; /* of the rows that are being written, or NULL */
    size_t n_positions;
    int32_t next;           /* position behind the row written last */
} kvant_learning;

/* Squared errors of sampled scores, up to a factor: the squared length of the keys in the version's
 * terms times that of the queries. One per kv head. */
void kvant_sample_costs(const kvant_tensor *tensor, uint32_t version, uint32_t n_threads, double *costs);

/* Whether there are enough rows and queries to judge by. */
bool kvant_sample_suffices(const kvant_tensor *tensor);

/* Values that name no centre have none: it would cost them a page of fp16 for the first tokens. */
static inline bool kvant_learns_center(const kvant_tensor *tensor)
{
    return kvant_tensor_codec_info(tensor)->center != KVANT_CENTER_NONE;
}
