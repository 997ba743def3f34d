/* learning.h - the inside of learning (learn.h): sums over keys and queries (sums.c, queries.c), matrices
 * from them (solve.c), the sample of rows and queries by which versions are judged (judge.c), and when a
 * version is made (learn.c).
 *
 * A unit is a part of a kv head (weights.h). Sums belong to the versions that were made from them: rows of
 * another kind begin new ones. Where keys turn with their positions (turn.h), sums are about position 0. */
#pragma once

#include "learn.h"
#include "turn.h"

#define SAMPLE_ROWS 64u    /* of a batch, by which versions are judged */
#define SAMPLE_QUERIES 32u /* per kv head, likewise: those noted last */
#define FEWEST_ROWS 16u    /* that are worth an estimate */
#define MOST_ALONE 8u      /* tokens that came alone, whose queries are summed together */

typedef struct unit_sums {
    uint32_t n_keys, n_queries, n_noted;
    float *key;  /* sum of keys less the origin */
    float *keys; /* sums of outer products (add_outers), as the next two */
    float *queries;
    float *noted; /* queries since the last judgement */
} unit_sums;

typedef struct kvant_learning {
    uint32_t part, n_units;         /* channels of a unit; units of all kv heads */
    uint32_t n_rows, n_rows_before; /* in the sample, now and before the last write */
    uint32_t *n_queries;            /* ever put into the sample, per kv head */
    uint32_t stamp;                 /* of the version that the sums belong to */
    uint32_t due;                   /* keys that the next matrix waits for */
    uint32_t n_alone;               /* tokens that came alone */
    uint32_t n_waiting;             /* of these, tokens whose queries are still to be summed */
    uint32_t waiting_heads;         /* query heads of a token that there is room for */
    float *waiting; /* MOST_ALONE x waiting_heads x head_dim, or NULL: none came yet */
    int32_t waiting_at[MOST_ALONE]; /* their positions */
    bool done;                      /* enough was seen */
    float *rows;                    /* SAMPLE_ROWS x width, then noted queries; NULL unless open */
    float *queries;                 /* SAMPLE_QUERIES x head_dim per kv head */
    float *sums;   /* other arrays of units, origin; NULL before learning and after it */
    float *origin; /* width */
    double *costs; /* per kv head: of versions, then the least */
    unit_sums *units;
    kvant_turn *turn; /* or NULL, as what follows */
    kvant_range ranges
        [KVANT_MOST_OCTAVES]; /* of the version from these sums for each octave, if there is one */
    uint32_t kin;             /* versions from these sums have the same */
    int32_t places[SAMPLE_ROWS]; /* positions of rows of the sample */
    int32_t *asked;              /* those of its queries */
    const int32_t *positions;    /* of the rows that are being written, or NULL */
    size_t n_positions;
    int32_t next; /* position behind the row written last */
    bool spent;   /* a judgement took what waited, so its memory can go */
} kvant_learning;

/* Values have no queries: a tensor of them learns from its rows alone. */
static inline bool kvant_learns_values(const kvant_tensor *tensor)
{
    return kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V;
}

/* Values that name no centre have none: it would cost them a page of fp16 for the first tokens. */
static inline bool kvant_learns_center(const kvant_tensor *tensor)
{
    return kvant_tensor_codec_info(tensor)->center != KVANT_CENTER_NONE;
}

static inline uint32_t kvant_unit_part(const kvant_tensor *tensor, size_t unit)
{
    return (uint32_t)(unit % (tensor->head_dim / tensor->learning->part));
}

static inline uint32_t kvant_unit_head(const kvant_tensor *tensor, size_t unit)
{
    return (uint32_t)(unit / (tensor->head_dim / tensor->learning->part));
}

/* A unit's channels of a row of all kv heads, or of one head. */
static inline void kvant_unit_gather(const kvant_tensor *tensor, size_t unit, const float *row,
                                     bool whole, float *out)
{
    const size_t at = whole ? kvant_unit_head(tensor, unit) * (size_t)tensor->head_dim : 0;
    kvant_part_gather(tensor->head_dim, tensor->learning->part, kvant_unit_part(tensor, unit),
                      row + at, out);
}

/* Puts a unit's channels into a row of all kv heads. */
static inline void kvant_unit_scatter(const kvant_tensor *tensor, size_t unit, const float *x,
                                      float *row)
{
    const size_t at = kvant_unit_head(tensor, unit) * (size_t)tensor->head_dim;
    kvant_part_scatter(tensor->head_dim, tensor->learning->part, kvant_unit_part(tensor, unit), x,
                       row + at);
}

/* Rows that are sampled. */
static inline kvant_new_rows kvant_sample_of(const kvant_tensor *tensor)
{
    return (kvant_new_rows){ tensor->learning->rows, kvant_tensor_width(tensor),
                             tensor->learning->n_rows, NULL };
}

/* Where the sampled rows are, or those that are written. */
static inline int32_t kvant_sample_place(const kvant_learning *l)
{
    return l->n_rows ? l->places[l->n_rows / 2] : l->next;
}

/* Vectors on their way into sums of outer products. */
typedef struct kvant_outers {
    const kvant_kernels *kernels;
    float *sums;
    uint32_t part, stride, n;
    float rows[8 * KVANT_MAX_HEAD_DIM];
} kvant_outers;

void kvant_outers_begin(kvant_outers *outers, const kvant_learning *l, float *sums);
void kvant_outers_end(kvant_outers *outers);

/* A place for the next vector, which counts when n does. */
float *kvant_outers_next(kvant_outers *outers);

/* sums.c */

/* The origin is there, and so are the units' sums, as they were or of no rows. KVANT_ERR_MEMORY. */
kvant_status kvant_sums_open(const kvant_tensor *tensor);

/* A row's position in its sequence; below 0: not known. */
int32_t kvant_row_position(const kvant_tensor *tensor, const kvant_new_rows *rows, size_t i);

/* Sums of no rows, about the sampled ones. Where no queries were noted since, those of other rows must do. */
void kvant_sums_begin(const kvant_tensor *tensor);

/* Rows, and the queries noted, join the sums. rows: a batch, or the sample. */
void kvant_sums_add(const kvant_tensor *tensor, const kvant_new_rows *rows, uint32_t n_threads);

/* What the fewest keys, or queries, of a unit are enough for. */
uint32_t kvant_sums_fewest(const kvant_learning *l, bool queries);

/* All that learning changes, for a write that fails and is tried again; NULL: no memory. */
typedef struct kvant_kept kvant_kept;
kvant_kept *kvant_sums_keep(const kvant_tensor *tensor);
void kvant_sums_restore(const kvant_tensor *tensor, const kvant_kept *kept);
void kvant_sums_drop(kvant_kept *kept); /* NULL: nothing happens */

/* Forgets rows and queries that wait for a judgement; gives their memory back, too; gives back the
 * sums, which learning needs no more. */
void kvant_learning_forget(kvant_learning *l);
void kvant_learning_close(kvant_learning *l);
void kvant_sums_close(kvant_learning *l);

/* queries.c: sums those that wait; a sample, and sums, of queries that all directions are alike
 * for. */
void kvant_queries_settle(const kvant_tensor *tensor, uint32_t n_threads);
void kvant_queries_assume(const kvant_tensor *tensor);
void kvant_queries_assume_sums(const kvant_learning *l);

/* solve.c: the candidate gets matrices from the sums, for a range of positions, and their centre. As it was on an error. stretch:
 * 0, or positions of an octave of the range whose keys will be about a centre of their own: kvant_solve_center has it, for the
 * tensor's channels. The candidate has those of blocks itself (center.h), where the tensor wants them. */
kvant_status kvant_solve(kvant_tensor *tensor, kvant_range range, uint32_t stretch,
                         uint32_t n_threads);
kvant_status kvant_solve_center(const kvant_tensor *tensor, int32_t first, int32_t last,
                                float *center);

/* judge.c */

/* Squared errors of sampled scores, up to a factor: the squared length of the keys in the version's
 * terms times that of the queries. One per kv head. */
void kvant_sample_costs(const kvant_tensor *tensor, uint32_t version, uint32_t n_threads,
                        double *costs);

/* Whether there are enough rows and queries to judge by. */
bool kvant_sample_suffices(const kvant_tensor *tensor);
