/* learn.c - see learn.h. Decides when a transform with W is made, and from which second moments. */
#include "learning.h"

#include <kvant/tensor_hooks.h>

#include "../base/alloc.h"
#include "../base/attributes.h"

/* The first matrix is made from the rows that there are. Each later one needs four times as many
 * rows, but at least SECOND_ROWS. On SmolLM2 twice the rows lower the error by less than 5 %, and a
 * matrix takes a millisecond per kv head. The last matrix is made from MOST_ROWS, or it was not
 * worth it, or it leaves one transform unused. */
#define SECOND_ROWS 256u
#define MOST_ROWS 960u /* of 2048 tokens without sinks, this many rows are accumulated */

/* A matrix gets a transform if it multiplies the squared error of the rows at hand by at most this
 * factor. A smaller gain is not worth the memory, nor one more transform of each query. */
#define WORTH_IT 0.95

/* The error of the candidate divided by the error of another transform, as a mean over heads. */
static double relative_cost(const kvant_tensor *tensor, uint32_t transform_id, uint32_t n_threads)
{
    double sum = 0, *costs = tensor->learning->costs, *others = costs + tensor->n_kv_heads;
    kvant_sample_costs(tensor, KVANT_CANDIDATE, n_threads, costs);
    kvant_sample_costs(tensor, transform_id, n_threads, others);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        sum += others[head] > 0 ? costs[head] / others[head] : 1;
    return sum / tensor->n_kv_heads;
}

/* Positions */

static kvant_status solve(kvant_tensor *tensor, kvant_bucket_span span, uint32_t n_threads)
{
    const kvant_rope_state *rope_state = tensor->learning->rope;
    return kvant_solve(tensor, span,
                       rope_state && rope_state->block_centers ? KVANT_PAGE_TOKENS : 0, n_threads);
}

static uint32_t count_spans(const kvant_learning *l, bool made)
{
    uint32_t n = 0;
    for (uint32_t i = 0; l->rope && i < l->rope->n_buckets; i++)
        n += made ? l->spans[i].end && l->spans[i].first == i : !l->spans[i].end;
    return n;
}

/* The run of position buckets for the next transform. Buckets without a transform are shared among
 * as many transforms as can still be made, except one, which is kept for rows of another kind. */
static kvant_bucket_span choose_span(const kvant_learning *l, uint32_t n_unused)
{
    const int32_t row_position = kvant_sample_position(l);
    if (!l->rope)
        return (kvant_bucket_span){ 0, 0 };
    const uint32_t first = kvant_rope_bucket(l->rope, row_position < 0 ? 0 : row_position),
                   made = count_spans(l, true);
    uint32_t end = first, most = n_unused > 2 ? n_unused - 1 : 1;
    if (l->spans[first].end)
        return l->spans[first];
    if (l->rope->n_position_transforms == 1)
        return (kvant_bucket_span){ 0, (uint8_t)l->rope->n_buckets };
    while (end < l->rope->n_buckets && !l->spans[end].end)
        end++;
    if (l->rope->n_position_transforms && most + made > l->rope->n_position_transforms)
        most = l->rope->n_position_transforms > made ? l->rope->n_position_transforms - made : 1;
    return (kvant_bucket_span){ (uint8_t)first,
                                (uint8_t)(first + (end - first + most - 1) / most) };
}

static void mark_span(kvant_learning *l, kvant_bucket_span span)
{
    for (uint32_t i = span.first; i < span.end; i++)
        l->spans[i] = span;
}

/* Marks a bucket for which no new transform was better, so that it is not tried
 * again. */
static void mark_bucket(kvant_learning *l, uint8_t bucket)
{
    if (l->rope)
        l->spans[bucket] = (kvant_bucket_span){ bucket, (uint8_t)(bucket + 1) };
}

/* Whether a transform from these second moments was tried for a position, or none can be tried. */
static bool was_tried(const kvant_learning *l, int32_t position)
{
    return !l->rope || position < 0 || l->spans[kvant_rope_bucket(l->rope, position)].end;
}

/* Whether the candidate has matrices already, before rows are added. */
static bool has_matrices(const kvant_tensor *tensor, const kvant_choice *choice)
{
    return choice->transform_id == KVANT_CANDIDATE &&
           tensor->transforms[KVANT_CANDIDATE].key_transform;
}

/* Whether there are enough keys and queries for matrices. */
static bool has_enough_samples(const kvant_learning *l)
{
    return kvant_moments_fewest(l, false) >= FEWEST_ROWS &&
           kvant_moments_fewest(l, true) >= FEWEST_ROWS;
}

/* If rows fit a transform from the same second moments, they are added before a new transform is
 * made. */
bool kvant_learning_needs_bucket(const kvant_tensor *tensor, const kvant_choice *choice, bool fits,
                                 uint32_t n_unused)
{
    const kvant_learning *l = tensor->learning;
    if (!l || n_unused < 2 || was_tried(l, kvant_sample_position(l)) || !count_spans(l, true) ||
        !has_enough_samples(l))
        return false;
    return !fits || !l->n_rows || tensor->transforms[choice->transform_id].lineage != l->lineage;
}

bool kvant_learning_knows_rope(const kvant_tensor *tensor)
{
    return tensor->learning && tensor->learning->rope;
}

bool kvant_learning_wants_rows(const kvant_tensor *tensor, const kvant_new_rows *rows)
{
    return tensor->learning &&
           (!tensor->learning->done ||
            !was_tried(tensor->learning, kvant_row_position(tensor, rows, rows->n / 2)));
}

/* Without a sample, the second moments decide, if the choice was made from them, too. */
static bool is_better(const kvant_tensor *tensor, const kvant_choice *choice, double least,
                      double most, uint32_t n_threads)
{
    if (!kvant_sample_has_enough(tensor))
        return tensor->transforms[choice->transform_id].lineage == tensor->learning->lineage;
    const double ratio = relative_cost(tensor, choice->transform_id, n_threads);
    return ratio < WORTH_IT && ratio * least <= most;
}

kvant_status kvant_learning_add_bucket(kvant_tensor *tensor, const kvant_choice *choice,
                                       double least, double most, uint32_t n_unused,
                                       uint32_t n_threads, bool *bucket_added)
{
    kvant_learning *l = tensor->learning;
    const kvant_bucket_span span = choose_span(l, n_unused);
    const kvant_status status = solve(tensor, span, n_threads);
    *bucket_added = status == KVANT_OK && is_better(tensor, choice, least, most, n_threads);
    if (*bucket_added)
        mark_span(l, span);
    else if (status != KVANT_ERR_MEMORY)
        mark_bucket(l, span.first);
    return status == KVANT_ERR_MEMORY ? status : KVANT_OK;
}

/* Whether a matrix is due when n more rows are accumulated. */
static bool is_due(const kvant_learning *l, size_t n)
{
    return !was_tried(l, kvant_sample_position(l)) || kvant_moments_fewest(l, false) + n >= l->due;
}

/* Makes a matrix if one is due. One unused transform is kept for rows of another kind, unless the
 * choice has no matrices yet; one more is kept for each position bucket without a transform. If the
 * second moments give no matrix, the rows are stored without one. */
static kvant_status improve(kvant_tensor *tensor, kvant_choice *choice, uint32_t n_unused,
                            uint32_t n_threads)
{
    kvant_learning *l = tensor->learning;
    const uint32_t n = kvant_moments_fewest(l, false);
    const bool plain = choice->transform_id == KVANT_CANDIDATE ||
                       !tensor->transforms[choice->transform_id].key_transform;
    const bool again = was_tried(l, kvant_sample_position(l));
    if (!is_due(l, 0) || !has_enough_samples(l) || !kvant_sample_has_enough(tensor))
        return KVANT_OK;
    const kvant_bucket_span span = choose_span(l, n_unused);
    l->due = 4 * n < SECOND_ROWS ? SECOND_ROWS : 4 * n < MOST_ROWS ? 4 * n : MOST_ROWS;
    l->done = n >= MOST_ROWS || n_unused < 2;
    if (n_unused < (plain ? 1u : 2u + (again ? count_spans(l, false) : 0)))
        return KVANT_OK;
    const kvant_status status = solve(tensor, span, n_threads);
    if (status == KVANT_OK && (choice->transform_id == KVANT_CANDIDATE ||
                               relative_cost(tensor, choice->transform_id, n_threads) < WORTH_IT)) {
        choice->transform_id = KVANT_CANDIDATE;
        mark_span(l, span);
    } else if (!again) {
        mark_bucket(l, span.first);
    }
    l->done |= choice->transform_id == KVANT_CANDIDATE ? n_unused < 3 : !plain;
    return status == KVANT_ERR_MEMORY ? status : KVANT_OK;
}

/* Whether the second moments belong to rows of another kind than the choice. They are about the
 * rows of one transform; if RoPE is known, about the rows of all transforms of the same lineage. */
static bool needs_new_moments(const kvant_tensor *tensor, const kvant_choice *choice)
{
    const kvant_learning *l = tensor->learning;
    const kvant_tensor_transform *transform = &tensor->transforms[choice->transform_id];
    return choice->transform_id == KVANT_CANDIDATE ||
           !(l->rope ? transform->lineage == l->lineage : transform->generation == l->generation);
}

static void begin_moments(const kvant_tensor *tensor, const kvant_choice *choice)
{
    kvant_moments_begin(tensor);
    tensor->learning->due =
        tensor->transforms[choice->transform_id].key_transform ? SECOND_ROWS : 0;
}

static bool is_learned_from(const kvant_learning *l)
{
    return !l->done || !was_tried(l, kvant_sample_position(l));
}

/* If the choice has matrices already, they were made from the existing second moments. */
static kvant_status add_rows(kvant_tensor *tensor, kvant_choice *choice, const kvant_new_rows *rows,
                             uint32_t n_unused, uint32_t n_threads)
{
    kvant_learning *l = tensor->learning;
    const bool bucket_added = has_matrices(tensor, choice),
               begins = !bucket_added && needs_new_moments(tensor, choice);
    const bool solves = begins || (!bucket_added && is_due(l, rows->n));
    kvant_status status = KVANT_OK;
    if (!begins && !is_learned_from(l))
        return KVANT_OK;
    KVANT_FORWARD(kvant_moments_reserve(tensor));
    kvant_saved_learning *before =
        solves ? kvant_moments_save(tensor) : NULL; /* else nothing can fail */
    KVANT_RETURN_IF(solves && !before, KVANT_ERR_MEMORY);
    if (begins)
        begin_moments(tensor, choice);
    if (is_learned_from(l)) {
        kvant_moments_add(tensor, rows, n_threads);
        status = bucket_added ? KVANT_OK : improve(tensor, choice, n_unused, n_threads);
    }
    if (status != KVANT_OK)
        kvant_moments_restore(tensor, before);
    kvant_moments_drop(before);
    return status;
}

/* Whether no further matrix will be made from the second moments. Rows of another kind would begin
 * new ones. A caller may ask for matrices of a range of positions at any time
 * (kvant_tensor_make_bucket_codecs). */
static bool has_ended(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    return l->done && !count_spans(l, false) && !tensor->device &&
           !(l->rope && l->rope->n_position_transforms);
}

kvant_status kvant_learning_add(kvant_tensor *tensor, kvant_choice *choice,
                                const kvant_new_rows *all, uint32_t n_unused, uint32_t n_threads)
{
    kvant_learning *l = tensor->learning;
    const kvant_new_rows sampled = kvant_sample_of(tensor);
    kvant_queries_settle(tensor, n_threads);
    if (l->n_rows) {
        KVANT_FORWARD(add_rows(tensor, choice, all ? all : &sampled, n_unused, n_threads));
    } else if (tensor->device && !has_matrices(tensor, choice) &&
               needs_new_moments(tensor, choice)) {
        KVANT_FORWARD(kvant_moments_reserve(tensor));
        begin_moments(tensor, choice); /* unseen rows may be of another kind */
    }
    kvant_learning_forget(l);
    l->spent = true;
    return KVANT_OK;
}

void kvant_learning_free_unused(const kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    if (l->spent && !l->n_rows && !l->n_pending_tokens && !l->sub_heads[0].n_pending)
        kvant_learning_close(l);
    l->spent = false;
    if (has_ended(tensor))
        kvant_moments_close(l);
}

void kvant_learning_publish(kvant_tensor *tensor, uint32_t transform_id)
{
    if (!tensor->learning)
        return;
    tensor->learning->generation = tensor->transforms[transform_id].generation;
    tensor->transforms[transform_id].lineage = tensor->learning->lineage;
}

/* Matrices for a caller's range of positions */

static kvant_status make_codecs(const kvant_tensor *tensor, const kvant_codec *const *likes,
                                kvant_codec **codecs)
{
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        KVANT_FORWARD(kvant_tensor_transform_codec(tensor, KVANT_CANDIDATE, KVANT_NO_POSITION, head,
                                                   likes[head], &codecs[head]));
    return KVANT_OK;
}

/* Solves for a range of positions as if every position existed. */
static kvant_status solve_span(kvant_tensor *tensor, int32_t first, int32_t last,
                               uint32_t center_span, uint32_t n_threads)
{
    kvant_rope_state *const rope_state = tensor->learning->rope, whole = *rope_state;
    whole.n_buckets = KVANT_MOST_BUCKETS;
    whole.n_positions = INT32_MAX;
    const kvant_bucket_span span = { (uint8_t)kvant_rope_bucket(&whole, first),
                                     (uint8_t)(kvant_rope_bucket(&whole, last) + 1) };
    tensor->learning->rope = &whole;
    const kvant_status status = kvant_solve(tensor, span, center_span, n_threads);
    tensor->learning->rope = rope_state;
    return status;
}

static bool knows_positions(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    return l && l->rope && has_enough_samples(l); /* so second moments exist */
}

kvant_status kvant_tensor_bucket_center(const kvant_tensor *tensor, int32_t first, int32_t last,
                                        float *center)
{
    KVANT_RETURN_IF(!tensor || !center || first < 0 || last < first, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!knows_positions(tensor), KVANT_ERR_UNSUPPORTED);
    return kvant_solve_center(tensor, first, last, center);
}

kvant_status kvant_tensor_make_bucket_codecs(kvant_tensor *tensor, int32_t first, int32_t last,
                                             uint32_t center_span, const kvant_codec *const *likes,
                                             kvant_codec **codecs, uint32_t n_threads)
{
    KVANT_RETURN_IF(!tensor || !likes || !codecs || first < 0 || last < first, KVANT_ERR_ARGUMENT);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        codecs[head] = NULL;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        KVANT_RETURN_IF(!kvant_transforms_accept(tensor, likes[head]), KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!knows_positions(tensor), KVANT_ERR_UNSUPPORTED);
    kvant_tensor_transform *candidate =
        &tensor->transforms[KVANT_CANDIDATE]; /* unused between two judgements */
    candidate->learned = true;                /* it has a centre */
    kvant_status status = solve_span(tensor, first, last, center_span, n_threads);
    if (status == KVANT_OK)
        status = make_codecs(tensor, likes, codecs);
    for (uint32_t head = 0; head < tensor->n_kv_heads && status != KVANT_OK; head++)
        kvant_codec_free(&codecs[head]);
    kvant_key_transform_free(&candidate->key_transform);
    return status;
}
