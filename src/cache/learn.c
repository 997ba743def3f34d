/* learn.c - see learn.h. Decides when a transform with W is made, and from which second moments. */
#include "learning.h"

#include "../base/attributes.h"

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

/* The position bucket that the rows at hand have reached; -1: not known. */
static int bucket_of_rows(const kvant_learning *l, int32_t position)
{
    return l->rope && position >= 0 ? (int)kvant_rope_bucket(l->rope, position) : -1;
}

static int bucket_of_sample(const kvant_learning *l)
{
    return bucket_of_rows(l, kvant_sample_position(l));
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
    return kvant_moments_fewest(l, false) >= KVANT_LEARN_SAMPLES &&
           kvant_moments_fewest(l, true) >= KVANT_LEARN_SAMPLES;
}

/* If rows fit a transform from the same second moments, they are added before a new transform is
 * made. */
bool kvant_learning_needs_bucket(const kvant_tensor *tensor, const kvant_choice *choice, bool fits,
                                 uint32_t n_unused)
{
    const kvant_learning *l = tensor->learning;
    if (!l || n_unused < 2 || kvant_learn_was_tried(&l->schedule, bucket_of_sample(l)) ||
        !kvant_learn_spans_made(&l->schedule) || !has_enough_samples(l))
        return false;
    return !fits || !l->n_rows || tensor->transforms[choice->transform_id].lineage != l->lineage;
}

bool kvant_learning_knows_rope(const kvant_tensor *tensor)
{
    return tensor->learning && tensor->learning->rope;
}

bool kvant_learning_wants_rows(const kvant_tensor *tensor, const kvant_new_rows *rows)
{
    const kvant_learning *l = tensor->learning;
    return l && kvant_learn_takes_rows(
                    &l->schedule, bucket_of_rows(l, kvant_row_position(tensor, rows, rows->n / 2)));
}

/* Without a sample, the second moments decide, if the choice was made from them, too. */
static bool is_better(const kvant_tensor *tensor, const kvant_choice *choice, double least,
                      double most, uint32_t n_threads)
{
    if (!kvant_sample_has_enough(tensor))
        return tensor->transforms[choice->transform_id].lineage == tensor->learning->lineage;
    const double ratio = relative_cost(tensor, choice->transform_id, n_threads);
    return ratio < KVANT_LEARN_WORTH && ratio * least <= most;
}

kvant_status kvant_learning_add_bucket(kvant_tensor *tensor, const kvant_choice *choice,
                                       double least, double most, uint32_t n_unused,
                                       uint32_t n_threads, bool *bucket_added)
{
    kvant_learning *l = tensor->learning;
    const kvant_bucket_span span =
        kvant_learn_next_span(&l->schedule, bucket_of_sample(l), n_unused);
    const kvant_status status = kvant_solve(tensor, span, n_threads);
    *bucket_added = status == KVANT_OK && is_better(tensor, choice, least, most, n_threads);
    if (status != KVANT_ERR_MEMORY)
        kvant_learn_made_span(&l->schedule, span, *bucket_added);
    return status == KVANT_ERR_MEMORY ? status : KVANT_OK;
}

/* Whether a matrix is due when n more rows are accumulated. */
static bool is_due(const kvant_learning *l, size_t n)
{
    return kvant_learn_is_due(&l->schedule, bucket_of_sample(l),
                              kvant_moments_fewest(l, false) + n);
}

/* Makes a matrix if one is due. If the second moments give no matrix, the rows are stored without
 * one. */
static kvant_status improve(kvant_tensor *tensor, kvant_choice *choice, uint32_t n_unused,
                            uint32_t n_threads)
{
    kvant_learning *l = tensor->learning;
    const int bucket = bucket_of_sample(l);
    const bool plain = choice->transform_id == KVANT_CANDIDATE ||
                       !tensor->transforms[choice->transform_id].key_transform;
    const bool again = kvant_learn_was_tried(&l->schedule, bucket);
    if (!is_due(l, 0) || !has_enough_samples(l) || !kvant_sample_has_enough(tensor))
        return KVANT_OK;
    const kvant_bucket_span span = kvant_learn_next_span(&l->schedule, bucket, n_unused);
    if (!kvant_learn_makes_matrix(&l->schedule, bucket, kvant_moments_fewest(l, false), plain,
                                  n_unused))
        return KVANT_OK;
    const kvant_status status = kvant_solve(tensor, span, n_threads);
    const bool better = status == KVANT_OK && (choice->transform_id == KVANT_CANDIDATE ||
                                               relative_cost(tensor, choice->transform_id,
                                                             n_threads) < KVANT_LEARN_WORTH);
    if (better)
        choice->transform_id = KVANT_CANDIDATE;
    if (better || !again)
        kvant_learn_made_span(&l->schedule, span, better);
    l->schedule.done |= choice->transform_id == KVANT_CANDIDATE ? n_unused < 3 : !plain;
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
    kvant_learn_begin(&tensor->learning->schedule,
                      tensor->transforms[choice->transform_id].key_transform != NULL);
}

static bool is_learned_from(const kvant_learning *l)
{
    return kvant_learn_takes_rows(&l->schedule, bucket_of_sample(l));
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
    if (!tensor->device && kvant_learn_has_ended(&l->schedule))
        kvant_moments_close(l);
}

void kvant_learning_publish(kvant_tensor *tensor, uint32_t transform_id)
{
    if (!tensor->learning)
        return;
    tensor->learning->generation = tensor->transforms[transform_id].generation;
    tensor->transforms[transform_id].lineage = tensor->learning->lineage;
}
