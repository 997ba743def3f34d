/* moments.c - accumulates second moments of keys, about a centre of the first keys, and of queries,
 * per sub-head (learning.h). Owns the life of these sums, and adds rows to them. */
#include "learning.h"

#include <math.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/parallel.h"

/* After centre and scale, a row with this many times the median squared length is left out, because
 * it says nothing about other rows. */
#define MOST_LENGTH 16.0f

/* If a batch has more rows than this, every second row counts. This raises the KLD of the first
 * 1024 tokens by a twentieth, and of later tokens not at all (learning.md). */
#define FEW_ROWS 128u

/* Numbers in a sub-head's part of l->sums: keys and queries. */
static size_t moments_of_sub_head(const kvant_learning *l)
{
    return l->part + 2 * kvant_lower_floats(l->part);
}

static size_t width_of(const kvant_learning *l)
{
    return (size_t)l->part * l->n_sub_heads;
}

/* How many numbers l->sums and l->rows have. */
static size_t moments_floats(const kvant_learning *l)
{
    return l->n_sub_heads * moments_of_sub_head(l) + width_of(l);
}

static size_t pending_floats(const kvant_learning *l)
{
    return SAMPLE_ROWS * width_of(l) + l->n_sub_heads * kvant_lower_floats(l->part);
}

/* Life */

kvant_status kvant_learning_create(kvant_tensor *tensor)
{
    const size_t width = kvant_tensor_width(tensor);
    if (!kvant_tensor_codec_info(tensor)->learns_transform ||
        (kvant_learns_values(tensor) && tensor->device))
        return KVANT_OK;
    kvant_learning *l = tensor->learning = kvant_alloc(1, sizeof *l);
    KVANT_RETURN_IF(!l, KVANT_ERR_MEMORY);
    l->part = kvant_key_transform_part(tensor->head_dim);
    l->n_sub_heads = (uint32_t)(width / l->part);
    l->n_queries = kvant_alloc(tensor->n_kv_heads, sizeof *l->n_queries);
    l->sub_heads = kvant_alloc(l->n_sub_heads, sizeof *l->sub_heads);
    l->query_positions =
        kvant_alloc((size_t)SAMPLE_QUERIES * tensor->n_kv_heads, sizeof *l->query_positions);
    l->queries = kvant_map(SAMPLE_QUERIES * width, sizeof *l->queries);
    l->costs =
        kvant_alloc((KVANT_MAX_TRANSFORMS + 1) * (size_t)tensor->n_kv_heads, sizeof *l->costs);
    const bool all = l->n_queries && l->query_positions && l->sub_heads && l->queries && l->costs;
    return all ? KVANT_OK : KVANT_ERR_MEMORY;
}

kvant_status kvant_learning_reserve(const kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    if (!l || l->rows)
        return KVANT_OK;
    l->rows = kvant_map(pending_floats(l), sizeof *l->rows);
    KVANT_RETURN_IF(!l->rows, KVANT_ERR_MEMORY);
    float *pending = l->rows + SAMPLE_ROWS * width_of(l);
    for (uint32_t sub_head = 0; sub_head < l->n_sub_heads; sub_head++)
        l->sub_heads[sub_head].pending = pending + sub_head * kvant_lower_floats(l->part);
    return KVANT_OK;
}

void kvant_learning_forget(kvant_learning *l)
{
    l->n_rows = l->n_rows_before = l->n_pending_tokens = 0;
    for (uint32_t sub_head = 0; sub_head < l->n_sub_heads; sub_head++)
        l->sub_heads[sub_head].n_pending = 0;
}

void kvant_learning_close(kvant_learning *l)
{
    kvant_learning_forget(l);
    kvant_unmap(l->rows, pending_floats(l), sizeof *l->rows);
    l->rows = NULL;
    for (uint32_t sub_head = 0; sub_head < l->n_sub_heads; sub_head++)
        l->sub_heads[sub_head].pending = NULL;
}

kvant_status kvant_moments_reserve(const kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    if (l->sums)
        return KVANT_OK;
    l->sums = kvant_map(moments_floats(l), sizeof *l->sums);
    KVANT_RETURN_IF(!l->sums, KVANT_ERR_MEMORY);
    l->origin = l->sums + l->n_sub_heads * moments_of_sub_head(l);
    for (uint32_t sub_head = 0; sub_head < l->n_sub_heads; sub_head++) {
        sub_head_moments *u = &l->sub_heads[sub_head];
        u->key = l->sums + sub_head * moments_of_sub_head(l);
        u->keys = u->key + l->part;
        u->queries = u->keys + kvant_lower_floats(l->part);
    }
    if (kvant_learns_values(tensor))
        kvant_queries_assume_moments(l);
    return KVANT_OK;
}

void kvant_moments_close(kvant_learning *l)
{
    kvant_unmap(l->sums, moments_floats(l), sizeof *l->sums);
    kvant_free(l->pending_queries);
    l->sums = l->origin = l->pending_queries = NULL;
    l->n_pending_tokens = l->pending_heads = 0;
    for (uint32_t sub_head = 0; sub_head < l->n_sub_heads; sub_head++) {
        sub_head_moments *u = &l->sub_heads[sub_head];
        u->key = u->keys = u->queries = NULL;
        u->n_keys = u->n_queries = 0;
    }
}

void kvant_learning_destroy(kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    if (!l)
        return;
    if (l->sub_heads) {
        kvant_learning_close(l);
        kvant_moments_close(l);
    }
    kvant_unmap(l->queries, SAMPLE_QUERIES * width_of(l), sizeof *l->queries);
    kvant_free(l->n_queries);
    kvant_free(l->query_positions);
    kvant_free(l->sub_heads);
    kvant_free(l->costs);
    kvant_free(l->rope);
    kvant_free(l);
    tensor->learning = NULL;
}

size_t kvant_learning_bytes(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    if (!l)
        return 0;
    size_t n =
        MOST_SINGLE * (size_t)l->pending_heads * tensor->head_dim + SAMPLE_QUERIES * width_of(l);
    n += l->sums ? moments_floats(l) : 0;
    n += l->rows ? pending_floats(l) : 0;
    return n * sizeof(float);
}

/* Query heads per kv head, for the estimate below. The model's number is not known yet; most models
 * have fewer. */
#define MANY_HEADS 8u

size_t kvant_learning_most(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    if (!l)
        return 0;
    const size_t queries = (SAMPLE_QUERIES + MOST_SINGLE * MANY_HEADS) * width_of(l);
    return (queries + moments_floats(l) + pending_floats(l)) * sizeof(float);
}

static void forget_queries(const kvant_learning *l, sub_head_moments *u)
{
    memset(u->queries, 0, kvant_lower_floats(l->part) * sizeof(float));
    u->n_queries = 0;
}

static void begin_lineage(kvant_learning *l)
{
    kvant_learn_begin(&l->schedule, false);
    l->lineage++;
}

static void forget_keys(kvant_learning *l)
{
    for (uint32_t sub_head = 0; sub_head < l->n_sub_heads; sub_head++) {
        sub_head_moments *u = &l->sub_heads[sub_head];
        memset(u->key, 0, (l->part + kvant_lower_floats(l->part)) * sizeof(float));
        u->n_keys = 0;
        if (u->n_pending)
            forget_queries(l, u);
    }
    begin_lineage(l);
}

void kvant_learning_reset(kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    if (!l)
        return;
    kvant_learning_close(l);
    kvant_moments_close(l);
    begin_lineage(l);
    memset(l->n_queries, 0, tensor->n_kv_heads * sizeof *l->n_queries);
    l->generation = 0;
    l->next = 0;
    if (kvant_learns_values(tensor))
        kvant_queries_assume(tensor);
}

/* A copy of the learning */

struct kvant_saved_learning {
    kvant_learning learning;
    size_t bytes;
    float *numbers; /* a copy of l->sums */
    sub_head_moments sub_heads[];
};

kvant_saved_learning *kvant_moments_save(const kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    const size_t head = sizeof(kvant_saved_learning) + l->n_sub_heads * sizeof *l->sub_heads;
    const size_t n = l->sums ? moments_floats(l) * sizeof(float) : 0;
    kvant_saved_learning *k = kvant_map(1, head + n);
    if (!k)
        return NULL;
    k->learning = *l;
    k->bytes = head + n;
    k->numbers = (float *)(k->sub_heads + l->n_sub_heads);
    memcpy(k->sub_heads, l->sub_heads, l->n_sub_heads * sizeof *l->sub_heads);
    if (n)
        memcpy(k->numbers, l->sums, n);
    return k;
}

void kvant_moments_restore(const kvant_tensor *tensor, const kvant_saved_learning *k)
{
    kvant_learning *l = tensor->learning;
    float *const opened = k->learning.sums ? NULL : l->sums; /* allocated after the copy */
    *l = k->learning;
    memcpy(l->sub_heads, k->sub_heads, l->n_sub_heads * sizeof *l->sub_heads);
    if (l->sums)
        memcpy(l->sums, k->numbers, moments_floats(l) * sizeof(float));
    kvant_unmap(opened, moments_floats(l), sizeof *opened);
}

void kvant_moments_drop(kvant_saved_learning *k)
{
    kvant_unmap(k, 1, k ? k->bytes : 0);
}

/* Outer products */

void kvant_moment_batch_begin(kvant_moment_batch *o, const kvant_learning *l, float *sums)
{
    o->kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    o->sums = sums;
    o->part = l->part;
    o->stride = kvant_lower_stride(l->part);
    o->n = 0;
    /* Cleared only if rows are padded: clearing for every token takes longer than adding it. */
    if (o->stride != o->part)
        memset(o->rows, 0, sizeof o->rows);
}

void kvant_moment_batch_end(kvant_moment_batch *o)
{
    o->kernels->add_outers(o->rows, o->stride, o->n, o->part, o->sums);
    o->n = 0;
}

float *kvant_moment_batch_next(kvant_moment_batch *o)
{
    if ((o->n + 1) * o->stride > sizeof o->rows / sizeof *o->rows)
        kvant_moment_batch_end(o);
    return o->rows + o->n * o->stride;
}

/* Rows */

/* The position of a slot in its sequence, as its block says. */
static uint64_t position_of_slot(const kvant_tensor *tensor, int64_t slot)
{
    return (uint64_t)tensor->blocks[slot / KVANT_PAGE_TOKENS].index * KVANT_PAGE_TOKENS +
           (uint64_t)slot % KVANT_PAGE_TOKENS;
}

/* Whether a slot has one of the first tokens, which a cache keeps as fp16. */
static bool is_kept(const kvant_tensor *tensor, int64_t slot)
{
    return position_of_slot(tensor, slot) < kvant_tensor_codec_info(tensor)->sink_tokens;
}

int32_t kvant_row_position(const kvant_tensor *tensor, const kvant_new_rows *rows, size_t i)
{
    const kvant_learning *l = tensor->learning;
    if (!rows->slots)
        return l->row_positions[i];
    if (l->positions && l->n_positions == rows->n)
        return l->positions[i];
    const uint64_t row_position = position_of_slot(tensor, rows->slots[i]);
    return row_position < INT32_MAX ? (int32_t)row_position : -1;
}

void kvant_learning_written(kvant_tensor *tensor, const int64_t *slots, size_t n)
{
    kvant_learning *l = tensor ? tensor->learning : NULL;
    const kvant_new_rows rows = { .n = n, .slots = slots };
    if (!l)
        return;
    l->spent |= !n; /* a write that failed had allocated memory for pending rows */
    kvant_learning_free_unused(tensor);
    l->n_single += n == 1;
    if (n) {
        const int32_t last = kvant_row_position(tensor, &rows, n - 1);
        l->next = last < 0 || last == INT32_MAX ? l->next : last + 1;
    }
    l->positions = NULL;
}

void kvant_learning_sample_rows(kvant_tensor *tensor, const kvant_new_rows *rows, bool first)
{
    const size_t width = kvant_tensor_width(tensor),
                 taken = rows->n < SAMPLE_ROWS ? rows->n : SAMPLE_ROWS;
    kvant_learning *l = tensor->learning;
    if (!l)
        return;
    l->n_rows = first ? 0 : l->n_rows;
    l->n_rows_before = l->n_rows;
    for (size_t i = 0; i < taken && l->n_rows < SAMPLE_ROWS; i++) {
        const size_t row = i * rows->n / taken;
        if (is_kept(tensor, rows->slots[row]))
            continue;
        l->row_positions[l->n_rows] = kvant_row_position(tensor, rows, row);
        memcpy(l->rows + l->n_rows++ * width, rows->rows + row * rows->stride,
               width * sizeof(float));
    }
}

void kvant_learning_undo_sample(kvant_tensor *tensor)
{
    tensor->learning->n_rows = tensor->learning->n_rows_before;
}

/* Sets a sub-head's origin to the mean of its sampled rows, rotated back to position 0. */
static void find_origin(const kvant_tensor *tensor, size_t sub_head)
{
    kvant_learning *l = tensor->learning;
    const kvant_new_rows sampled = kvant_sample_of(tensor);
    float sum[KVANT_MAX_HEAD_DIM] = { 0 }, x[KVANT_MAX_HEAD_DIM];
    kvant_rope_rotation rotation;
    kvant_rope_rotation_begin(&rotation, l->rope, kvant_sub_head_part(tensor, sub_head));
    for (uint32_t i = 0; i < l->n_rows; i++) {
        kvant_sub_head_gather(tensor, sub_head, sampled.rows + i * sampled.stride, true, x);
        kvant_rope_rotate_back(&rotation, l->row_positions[i] < 0 ? 0 : l->row_positions[i], x);
        for (uint32_t j = 0; j < l->part; j++)
            sum[j] += x[j] / (float)l->n_rows;
    }
    kvant_sub_head_scatter(tensor, sub_head, sum, l->origin);
}

/* If RoPE is not known, the origin is the candidate's centre. */
void kvant_moments_begin(const kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    forget_keys(l);
    memcpy(l->origin, tensor->transforms[KVANT_CANDIDATE].center,
           kvant_tensor_width(tensor) * sizeof *l->origin);
    for (uint32_t sub_head = 0; sub_head < l->n_sub_heads && l->rope && l->n_rows; sub_head++)
        find_origin(tensor, sub_head);
}

static float middle(float *x, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t j = i; j > 0 && x[j] < x[j - 1]; j--) {
            const float swap = x[j];
            x[j] = x[j - 1];
            x[j - 1] = swap;
        }
    return x[n / 2];
}

typedef struct add_job {
    const kvant_tensor *tensor;
    const kvant_new_rows *rows; /* slots NULL: the sample, which has no sinks */
} add_job;

typedef struct row_reader {
    const kvant_tensor *tensor;
    size_t sub_head;
    float origin[KVANT_MAX_HEAD_DIM], inverse[KVANT_MAX_HEAD_DIM]; /* inverse: 1 / scale */
    kvant_rope_rotation rotation;
} row_reader;

static void begin_rows(row_reader *r, const kvant_tensor *tensor, size_t sub_head)
{
    r->tensor = tensor;
    r->sub_head = sub_head;
    kvant_sub_head_gather(tensor, sub_head, tensor->learning->origin, true, r->origin);
    kvant_sub_head_gather(tensor, sub_head, tensor->transforms[KVANT_CANDIDATE].scale, true,
                          r->inverse);
    for (uint32_t j = 0; j < tensor->learning->part; j++)
        r->inverse[j] = 1 / r->inverse[j];
    kvant_rope_rotation_begin(&r->rotation, tensor->learning->rope,
                              kvant_sub_head_part(tensor, sub_head));
}

/* The next two functions are not inlined by hand: `restrict` parameters let the compiler vectorise
 * their loops. */
static void put_about(uint32_t n, const float *restrict origin, const float *restrict inverse,
                      float *restrict z, float *restrict scaled)
{
    for (uint32_t j = 0; j < n; j++) {
        z[j] -= origin[j];
        scaled[j] = z[j] * inverse[j];
    }
}

static void add(uint32_t n, const float *restrict z, float *restrict sum)
{
    for (uint32_t j = 0; j < n; j++)
        sum[j] += z[j];
}

/* Writes a part of row i to z, rotated back to position 0 and without the origin. Returns its
 * squared length after division by the candidate's scale. NaN: the row's position is not known. */
static float read_row(row_reader *r, const kvant_new_rows *rows, size_t i, float *z)
{
    const int32_t position = r->rotation.n ? kvant_row_position(r->tensor, rows, i) : 0;
    const uint32_t n = r->tensor->learning->part;
    float scaled[KVANT_MAX_HEAD_DIM];
    if (position < 0)
        return NAN;
    kvant_sub_head_gather(r->tensor, r->sub_head, rows->rows + i * rows->stride, true, z);
    kvant_rope_rotate_back(&r->rotation, position, z);
    put_about(n, r->origin, r->inverse, z, scaled);
    return kvant_kernels_get(KVANT_CPU_AUTO)->dot(scaled, scaled, n);
}

/* The largest squared length of a row that counts. */
static float find_most(row_reader *r, float *z)
{
    const kvant_new_rows sampled = kvant_sample_of(r->tensor);
    float lengths[SAMPLE_ROWS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < sampled.n; i++) {
        lengths[n] = read_row(r, &sampled, i, z);
        n += isnan(lengths[n]) ? 0 : 1;
    }
    return n ? MOST_LENGTH * middle(lengths, n) : -1;
}

static void add_sub_head(void *context, size_t sub_head, uint32_t worker)
{
    const add_job *job = context;
    const kvant_learning *l = job->tensor->learning;
    const kvant_new_rows *rows = job->rows;
    sub_head_moments *u = &l->sub_heads[sub_head];
    row_reader r;
    kvant_moment_batch sums;
    (void)worker;
    begin_rows(&r, job->tensor, sub_head);
    kvant_moment_batch_begin(&sums, l, u->keys);
    const float most = find_most(&r, sums.rows);
    for (size_t i = 0; i<rows->n; i += rows->n> FEW_ROWS ? 2 : 1) {
        float *z = kvant_moment_batch_next(&sums);
        if ((rows->slots && is_kept(job->tensor, rows->slots[i])) ||
            !(read_row(&r, rows, i, z) <= most))
            continue;
        add(l->part, z, u->key);
        sums.n++;
        u->n_keys++;
    }
    kvant_moment_batch_end(&sums);
    if (u->n_pending)
        add((uint32_t)kvant_lower_floats(l->part), u->pending, u->queries);
    u->n_queries += u->n_pending;
}

void kvant_moments_add(const kvant_tensor *tensor, const kvant_new_rows *rows, uint32_t n_threads)
{
    add_job job = { tensor, rows };
    kvant_parallel_for(tensor->learning->n_sub_heads, n_threads, add_sub_head, &job);
}

uint32_t kvant_moments_fewest(const kvant_learning *l, bool queries)
{
    uint32_t least = UINT32_MAX;
    for (uint32_t sub_head = 0; sub_head < l->n_sub_heads; sub_head++) {
        const uint32_t n =
            queries ? l->sub_heads[sub_head].n_queries : l->sub_heads[sub_head].n_keys;
        least = n < least ? n : least;
    }
    return least;
}
