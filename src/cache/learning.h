/* learning.h - the inside of learning (learn.h). moments.c and queries.c accumulate second moments
 * of keys and queries. solve.c makes matrices from them. Then select.c judges transforms by a
 * sample. The file learn.c decides when a transform is made.
 *
 * A sub-head (`sub_head`) is a part of a kv head (key_transform.h). Second moments belong to the
 * transforms that were made from them; rows of another kind begin new second moments. If RoPE is
 * known (kvant_rope), keys and queries are rotated back to position 0 before they are added. */
#pragma once

#include "learn.h"
#include "rope.h"

/* Transforms are judged by at most this many rows of a batch and this many queries per kv head, the
 * newest ones. */
#define SAMPLE_ROWS 64u
#define SAMPLE_QUERIES 32u
#define MOST_SINGLE 8u /* pending single tokens whose queries are accumulated together */

typedef struct sub_head_moments {
    uint32_t n_keys, n_queries, n_pending;
    float *key;     /* sum of keys minus the origin */
    float *keys;    /* sums of outer products of the same vectors (add_outers) */
    float *queries; /* sums of outer products of queries */
    float *pending; /* sums of outer products of the queries since the last judgement */
} sub_head_moments;

typedef struct kvant_learning {
    uint32_t part, n_sub_heads;     /* channels of a sub-head; sub-heads of all kv heads */
    uint32_t n_rows, n_rows_before; /* rows in the sample: now, and before the last write */
    uint32_t *n_queries;            /* per kv head: queries that were ever put into the sample */
    uint32_t generation;            /* generation of the transform that the moments belong to */
    kvant_learn_schedule schedule;  /* when a matrix is made from the moments */
    uint32_t n_single;              /* single tokens that were written */
    uint32_t n_pending_tokens;      /* tokens in `pending_queries` */
    uint32_t pending_heads;         /* query heads per token in `pending_queries` */
    /* Pending queries of single tokens: MOST_SINGLE x pending_heads x head_dim. NULL: none came
     * yet. */
    float *pending_queries;
    int32_t pending_positions[MOST_SINGLE]; /* the positions of these tokens */
    float *rows;    /* SAMPLE_ROWS x width, then `pending` of all sub-heads; NULL unless open */
    float *queries; /* the sample: SAMPLE_QUERIES x head_dim per kv head */
    float *sums;    /* other arrays of sub-heads, then origin; NULL before and after learning */
    float *origin;  /* width: a centre of the first keys, subtracted from all keys */
    double *costs;  /* by transform and kv head: the error; then the least error of each kv head */
    sub_head_moments *sub_heads;
    kvant_rope_state
        *rope; /* RoPE of the keys; NULL: not known, and the members below are not used */
    uint32_t
        lineage; /* lineage: all transforms that were made from these moments have this number */
    int32_t row_positions[SAMPLE_ROWS]; /* positions of the sampled rows */
    int32_t *query_positions;           /* positions of the sampled queries */
    const int32_t *positions;           /* of the rows that are being written, or NULL */
    size_t n_positions;
    int32_t next; /* the position after the row that was written last */
    bool spent;   /* a judgement has used the pending rows, so their memory can be freed */
} kvant_learning;

/* Whether the tensor holds values. They have no queries, so the tensor learns from its rows
 * alone. */
static inline bool kvant_learns_values(const kvant_tensor *tensor)
{
    return kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V;
}

/* queries.c: whether kvant_tensor_note_queries only copies the queries of a single token with
 * n_heads heads. Otherwise it runs a loop. */
bool kvant_queries_only_copies(const kvant_tensor *tensor, uint32_t n_heads);

/* Whether the tensor learns a centre. Values learn none unless their spec names one, because a
 * centre costs them a page of fp16 for the first tokens. */
static inline bool kvant_learns_center(const kvant_tensor *tensor)
{
    return kvant_tensor_codec_info(tensor)->center != KVANT_CENTER_NONE;
}

static inline uint32_t kvant_sub_head_part(const kvant_tensor *tensor, size_t sub_head)
{
    return (uint32_t)(sub_head % (tensor->head_dim / tensor->learning->part));
}

static inline uint32_t kvant_sub_head_kv_head(const kvant_tensor *tensor, size_t sub_head)
{
    return (uint32_t)(sub_head / (tensor->head_dim / tensor->learning->part));
}

/* Copies the channels of a sub-head from a row: whole: a row of all kv heads; otherwise of one kv
 * head. */
static inline void kvant_sub_head_gather(const kvant_tensor *tensor, size_t sub_head,
                                         const float *row, bool whole, float *out)
{
    const size_t at =
        whole ? kvant_sub_head_kv_head(tensor, sub_head) * (size_t)tensor->head_dim : 0;
    kvant_part_gather(tensor->head_dim, tensor->learning->part,
                      kvant_sub_head_part(tensor, sub_head), row + at, out);
}

/* Puts a sub-head's channels into a row of all kv heads. */
static inline void kvant_sub_head_scatter(const kvant_tensor *tensor, size_t sub_head,
                                          const float *x, float *row)
{
    const size_t at = kvant_sub_head_kv_head(tensor, sub_head) * (size_t)tensor->head_dim;
    kvant_part_scatter(tensor->head_dim, tensor->learning->part,
                       kvant_sub_head_part(tensor, sub_head), x, row + at);
}

/* The sampled rows. */
static inline kvant_new_rows kvant_sample_of(const kvant_tensor *tensor)
{
    return (kvant_new_rows){ tensor->learning->rows, kvant_tensor_width(tensor),
                             tensor->learning->n_rows, NULL };
}

/* The position of the middle of the sampled rows; without a sample, the position of the next
 * row. */
static inline int32_t kvant_sample_position(const kvant_learning *l)
{
    return l->n_rows ? l->row_positions[l->n_rows / 2] : l->next;
}

/* Collects vectors and adds their outer products to `sums`, several vectors at once. */
typedef struct kvant_moment_batch {
    const kvant_kernels *kernels;
    float *sums;
    uint32_t part, stride, n;
    float rows[8 * KVANT_MAX_HEAD_DIM];
} kvant_moment_batch;

void kvant_moment_batch_begin(kvant_moment_batch *outers, const kvant_learning *l, float *sums);
void kvant_moment_batch_end(kvant_moment_batch *outers);

/* Returns room for the next vector. The vector counts when the caller increments n. */
float *kvant_moment_batch_next(kvant_moment_batch *outers);

/* moments.c */

/* Allocates the origin and the second moments, if they are not there. They begin as zeros.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_moments_reserve(const kvant_tensor *tensor);

/* The position of row i in its sequence. Below 0: not known. */
int32_t kvant_row_position(const kvant_tensor *tensor, const kvant_new_rows *rows, size_t i);

/* Begins new second moments, whose origin comes from the sampled rows. The moments of queries are
 * kept when no queries have arrived since the last judgement. */
void kvant_moments_begin(const kvant_tensor *tensor);

/* Adds rows, and the queries since the last judgement, to the second moments. rows: a batch, or the
 * sample. */
void kvant_moments_add(const kvant_tensor *tensor, const kvant_new_rows *rows, uint32_t n_threads);

/* The smallest number of keys, or of queries, that any sub-head's moments have. */
uint32_t kvant_moments_fewest(const kvant_learning *l, bool queries);

/* A copy of everything that learning changes, so that a write that fails can be tried again. NULL:
 * memory is short. */
typedef struct kvant_saved_learning kvant_saved_learning;
kvant_saved_learning *kvant_moments_save(const kvant_tensor *tensor);
void kvant_moments_restore(const kvant_tensor *tensor, const kvant_saved_learning *kept);
void kvant_moments_drop(kvant_saved_learning *kept); /* NULL: nothing happens */

/* kvant_learning_forget forgets pending rows and queries. kvant_learning_close also frees their
 * memory. kvant_moments_close frees the second moments when learning needs them no more. */
void kvant_learning_forget(kvant_learning *l);
void kvant_learning_close(kvant_learning *l);
void kvant_moments_close(kvant_learning *l);

/* queries.c. kvant_queries_settle adds the pending queries of single tokens to the second moments.
 * For values, kvant_queries_assume makes a sample of queries for which all directions are alike,
 * and kvant_queries_assume_moments makes their second moments. */
void kvant_queries_settle(const kvant_tensor *tensor, uint32_t n_threads);
void kvant_queries_assume(const kvant_tensor *tensor);
void kvant_queries_assume_moments(const kvant_learning *l);

/* solve.c: makes matrices from the second moments, for a run of position buckets, and gives them
 * and their centre to the candidate. On an error the candidate is unchanged. If the tensor wants
 * centres of blocks (center.h), they are made here, too, and each block of 64 positions has its own
 * centre instead of the candidate's. */
kvant_status kvant_solve(kvant_tensor *tensor, kvant_bucket_span span, uint32_t n_threads);

/* select.c */

/* costs[h] = the squared error of sampled scores of kv head h with this transform, up to a factor.
 * It is the squared length of the transformed keys times the squared length of the transformed
 * queries. */
void kvant_sample_costs(const kvant_tensor *tensor, uint32_t transform_id, uint32_t n_threads,
                        double *costs);

/* Whether the sample has enough rows and queries for a judgement. */
bool kvant_sample_has_enough(const kvant_tensor *tensor);
