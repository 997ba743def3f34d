/* write.c - writes rows to one tensor or two: checks all rows, learns from them, and seals old
 * blocks. write_encode.c places the rows and encodes them.
 *
 * After the check nothing can fail. A row for an open page is also checked for the sealed page that
 * follows. */
#include "write.h"

#include <float.h>
#include <math.h>

#include <kvant/tensor_hooks.h>

#include "../base/attributes.h"
#include "../base/parallel.h"
#include "center.h"
#include "shift.h"
#include "key_transform.h"

#define ROWS_FOR_THREADS 16u /* with fewer rows, waking a thread costs more than encoding */

/* Checking */

static kvant_status check_run(const kvant_write_job *job, const kvant_run *r, uint32_t head,
                              uint32_t transform_id)
{
    const kvant_tensor *tensor = job->tensor;
    const kvant_codec *codec = tensor->codecs[head];
    float room[KVANT_MAX_HEAD_DIM];
    kvant_affine affine =
        kvant_affine_at(tensor, transform_id, head, kvant_write_position(job, r), room);
    const float *rows = job->seen + r->first * job->stride + (size_t)head * tensor->head_dim;
    const kvant_transform *transform = kvant_tensor_head_transform(tensor, transform_id, head);
    const bool open = kvant_write_opens(tensor, r->block, transform_id);
    if (tensor->half_rows && !open)
        KVANT_FORWARD(kvant_codec_check_rows(codec, transform, job->kernels, &affine, rows,
                                             job->stride, r->n, true));
    return kvant_codec_check_rows(codec, transform, job->kernels, &affine, rows, job->stride, r->n,
                                  open);
}

/* Checks the rows for the transforms that they will get. A block keeps its transform if its rows do
 * not fit the new one. */
static kvant_status check_head(const kvant_write_job *job, uint32_t head)
{
    for (size_t first = 0; first < job->n;) {
        kvant_run r = kvant_write_run(job, first);
        uint32_t transform_id = kvant_write_transform(job, &r),
                 own = job->tensor->blocks[r.block].transform_id;
        KVANT_FORWARD(check_run(job, &r, head, transform_id));
        if (job->tensor->blocks[r.block].written && own != transform_id)
            KVANT_FORWARD(check_run(job, &r, head, own));
        first += r.n;
    }
    return KVANT_OK;
}

static void check_run_of_head(void *context, size_t head, uint32_t worker)
{
    kvant_write_job *job = context;
    kvant_status status = check_head(job, (uint32_t)head);
    (void)worker;
    if (status != KVANT_OK)
        atomic_store_explicit(&job->status, (int)status, memory_order_relaxed);
}

/* Copies rows from a device to the host, if a new transform may not fit them. */
static void see(kvant_write_job *job)
{
    if (!job->seen && job->choice.selected &&
        !kvant_transforms_fit(job->tensor, job->choice.transform_id))
        job->seen = job->tensor->device->look(job->tensor, job->rows, job->stride, job->n);
}

/* Makes sure that rows can be written with the transforms that blocks have, or get without a
 * judgement. It comes before anything is learned, so that nothing has changed if memory is
 * short. */
static kvant_status prepare(const kvant_write_job *job)
{
    kvant_tensor *tensor = job->tensor;
    if (job->n) {
        KVANT_FORWARD(kvant_transforms_reserve(tensor));
        KVANT_FORWARD(kvant_learning_reserve(tensor));
    }
    for (size_t first = 0; tensor->learning && !tensor->device && first < job->n;) {
        const kvant_run r = kvant_write_run(job, first);
        KVANT_FORWARD(kvant_transforms_prepare(tensor, kvant_write_transform(job, &r)));
        KVANT_FORWARD(kvant_transforms_prepare(tensor, tensor->blocks[r.block].transform_id));
        first += r.n;
    }
    return KVANT_OK;
}

static kvant_status check_all(kvant_write_job *job)
{
    see(job);
    if (!job->seen)
        return KVANT_OK;
    atomic_store(&job->status, KVANT_OK);
    kvant_parallel_for(job->tensor->n_kv_heads, job->n >= ROWS_FOR_THREADS ? job->n_threads : 1,
                       check_run_of_head, job);
    return (kvant_status)atomic_load(&job->status);
}

/* Learning */

/* Whether the rows that are pending for the first transform need more open pages than there are,
 * without sinks and their pages. */
static bool pages_are_short(const kvant_write_job *job)
{
    const kvant_tensor *tensor = job->tensor;
    uint32_t needed = tensor->n_sink_pages;
    if (!kvant_transforms_pending(tensor))
        return false;
    for (uint32_t i = 0; i < tensor->n_open_pages; i++) {
        const int64_t block = tensor->open_pages[i].block;
        needed += block >= 0 && !kvant_is_sink(tensor, (uint32_t)block);
    }
    for (size_t first = 0; first < job->n;) {
        kvant_run r = kvant_write_run(job, first);
        needed += tensor->blocks[r.block].open_page < 0 && !kvant_is_sink(tensor, r.block);
        first += r.n;
    }
    return needed > tensor->n_open_pages;
}

static bool all_finite(const kvant_write_job *job)
{
    size_t width = kvant_tensor_width(job->tensor);
    for (size_t i = 0; job->seen && i < job->n; i++)
        if (job->kernels->magnitude(job->seen + i * job->stride, (uint32_t)width) >= 0x7f800000u)
            return false;
    return true;
}

/* Whether a long batch is judged without earlier rows, before its rows are checked for their
 * transforms. */
static bool is_long_batch(const kvant_write_job *job)
{
    return job->tensor->learns && job->n >= KVANT_LEARN_ROWS;
}

/* Checks the rows as far as possible before any tensor learns from them. */
static kvant_status check_first(const kvant_write_job *job)
{
    KVANT_FORWARD(prepare(job));
    return is_long_batch(job) && !all_finite(job) ? KVANT_ERR_NONFINITE : KVANT_OK;
}

static kvant_status check_job(kvant_write_job *job)
{
    if (is_long_batch(job)) {
        const kvant_new_rows rows = { job->rows, job->stride, job->n, job->slots };
        job->choice = kvant_transforms_select(job->tensor, &rows, job->n_threads);
        KVANT_FORWARD(job->choice.status);
    }
    return check_all(job);
}

static bool keep(kvant_write_job *job)
{
    if (!job->undoable)
        return true;
    kvant_learning_spread(job->tensor, job->n_threads);
    job->kept = kvant_moments_save(job->tensor);
    return job->kept != NULL;
}

/* Judges rows, after all rows of the write were checked: refused rows must leave no trace. A long
 * batch is judged without earlier rows, which are forgotten. Short batches are judged together. */
static kvant_status learn(kvant_write_job *job)
{
    if (!job->tensor->learns)
        return KVANT_OK;
    if (!is_long_batch(job)) {
        const kvant_new_rows rows = { job->rows, job->stride, job->n, job->slots };
        const bool selected =
            job->tensor->recent.n + job->n >= KVANT_LEARN_ROWS || pages_are_short(job);
        kvant_transforms_note(job->tensor, &rows, selected || job->undoable);
        if (!selected)
            return KVANT_OK;
        job->choice.status = KVANT_ERR_MEMORY;
        if (keep(job))
            job->choice = kvant_transforms_select_pending(job->tensor, job->n_threads);
        if (job->choice.status != KVANT_OK) {
            kvant_transforms_undo_note(job->tensor);
            return job->choice.status;
        }
        job->resets = check_all(job) != KVANT_OK;
        job->choice.selected = job->choice.selected && !job->resets;
    }
    job->forgets = true;
    return KVANT_OK;
}

static void undo(const kvant_write_job *job)
{
    if (is_long_batch(job))
        return;
    if (job->kept)
        kvant_moments_restore(job->tensor, job->kept);
    kvant_key_transform_free(&job->tensor->transforms[KVANT_CANDIDATE].key_transform);
    kvant_transforms_undo_note(job->tensor);
}

/* Lets all tensors learn, which takes memory for matrices. No choice is put into force until every
 * tensor has learned, so a write that fails for values leaves keys unchanged. */
static kvant_status learn_all(kvant_write_job *jobs, size_t n_jobs)
{
    kvant_status status = KVANT_OK;
    for (int matrices = 1; matrices >= 0; matrices--)
        for (size_t i = 0; i < n_jobs && status == KVANT_OK; i++) {
            if ((jobs[i].tensor->learning != NULL) != matrices)
                continue;
            jobs[i].undoable = matrices && i + 1 < n_jobs && jobs[i + 1].tensor->learning;
            status = learn(&jobs[i]);
        }
    if (status != KVANT_OK && jobs[0].undoable && jobs[0].choice.status == KVANT_OK)
        undo(&jobs[0]);
    for (size_t i = 0; i < n_jobs; i++) {
        kvant_moments_drop(jobs[i].kept);
        if (status == KVANT_OK && jobs[i].resets)
            kvant_learning_reset(jobs[i].tensor);
        if (status == KVANT_OK && jobs[i].forgets)
            kvant_transforms_forget(jobs[i].tensor);
        if (status == KVANT_OK)
            kvant_choice_publish(jobs[i].tensor, &jobs[i].choice);
    }
    return status;
}

static bool valid_slots(const kvant_tensor *tensor, const int64_t *slots, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (slots[i] < 0 || (uint64_t)slots[i] / KVANT_PAGE_TOKENS >= tensor->n_blocks)
            return false;
    return true;
}

float kvant_tensor_safe_input(const kvant_tensor *tensor)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    float least = FLT_MAX;
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++)
        for (uint32_t head = 0; tensor->transforms[v].alive && head < tensor->n_kv_heads; head++) {
            float room[KVANT_MAX_HEAD_DIM];
            const kvant_affine affine = kvant_affine_widest(tensor, v, head, room);
            least =
                fminf(least, kvant_codec_safe_input(kvant_tensor_head_transform(tensor, v, head),
                                                    kernels, &affine));
        }
    return least;
}

static kvant_status check_arguments(const kvant_write_job *job)
{
    const kvant_tensor *tensor = job->tensor;
    KVANT_RETURN_IF(!tensor || !job->slots || !job->rows || !job->n_threads, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(job->n > 1 && job->stride < kvant_tensor_width(tensor), KVANT_ERR_ARGUMENT);
    return valid_slots(tensor, job->slots, job->n) ? KVANT_OK : KVANT_ERR_ARGUMENT;
}

static bool any_left(const kvant_write_job *jobs, size_t n_jobs)
{
    for (size_t i = 0; i < n_jobs; i++)
        if (jobs[i].done < jobs[i].n)
            return true;
    return false;
}

/* Whether the write is one row for a block that has an open page and keeps its transform. Placing
 * such a row changes no other block. */
static bool goes_on(const kvant_write_job *job)
{
    const kvant_tensor *tensor = job->tensor;
    if (job->n != 1 || tensor->device)
        return false;
    const kvant_run r = kvant_write_run(job, 0);
    const kvant_block *block = &tensor->blocks[r.block];
    return block->open_page >= 0 && block->transform_id == kvant_write_transform(job, &r);
}

/* Seals old rows. With an exact part it seals before the write, so that queries of the same step
 * see the rows of this write as fp16. Otherwise it seals after each part of the write. */
static void seal_between(kvant_write_job *jobs, size_t n_jobs, bool begins)
{
    kvant_tensor *due[2];
    size_t n_due = 0;
    for (size_t i = 0; i < n_jobs; i++) {
        kvant_tensor *tensor = jobs[i].tensor;
        const int64_t *placed = jobs[i].slots + jobs[i].done - jobs[i].n_placed;
        if (begins)
            kvant_open_begin(tensor, jobs[i].slots, jobs[i].n);
        else if (!tensor->step_rows)
            kvant_open_end(tensor, placed, jobs[i].n_placed);
        const bool now = tensor->step_rows ? begins || jobs[i].n > tensor->step_rows : !begins;
        if (!now || kvant_transforms_pending(tensor))
            continue;
        if (begins && goes_on(&jobs[i]) &&
            kvant_open_take_due(tensor, kvant_write_run(&jobs[i], 0).block))
            continue;
        if (tensor->step_rows || tensor->always_open)
            due[n_due++] = tensor;
        else
            kvant_open_seal_due(&tensor, 1, true, jobs[i].n_threads);
    }
    if (n_due)
        kvant_open_seal_due(due, n_due, false, jobs->n_threads);
}

static kvant_status begin(kvant_write_job *jobs, size_t n_jobs)
{
    kvant_status status = KVANT_OK;
    for (size_t i = 0; i < n_jobs && status == KVANT_OK; i++) {
        kvant_transforms_age(jobs[i].tensor, jobs[i].n);
        status = check_first(&jobs[i]);
    }
    for (size_t i = 0; i < n_jobs && status == KVANT_OK; i++)
        status = check_job(&jobs[i]);
    for (size_t i = 0; i < n_jobs && status != KVANT_OK; i++)
        if (jobs[i].choice.selected && jobs[i].choice.status == KVANT_OK) /* learning has changed */
            kvant_learning_reset(jobs[i].tensor);
    KVANT_FORWARD(status);
    KVANT_FORWARD(learn_all(jobs, n_jobs));
    seal_between(jobs, n_jobs, true);
    return KVANT_OK;
}

static kvant_status end(kvant_write_job *jobs, size_t n_jobs)
{
    kvant_status status = KVANT_OK;
    for (size_t i = 0; i < n_jobs && status == KVANT_OK; i++) {
        kvant_open_end(jobs[i].tensor, jobs[i].slots, jobs[i].n);
        kvant_write_note_transforms(&jobs[i]);
        status = kvant_pages_status(jobs[i].tensor);
    }
    return status;
}

/* For slots whose keys were shifted: rotates rows back, so that they are stored as before the
 * shift. */
static kvant_status unshift(kvant_write_job *job, kvant_unshifted *unshifted)
{
    KVANT_FORWARD(
        kvant_unshift(job->tensor, job->slots, job->n, job->rows, job->stride, unshifted));
    job->shifts = unshifted->ids;
    if (unshifted->rows) {
        job->rows = job->seen = unshifted->rows;
        job->stride = kvant_tensor_width(job->tensor);
    }
    return KVANT_OK;
}

kvant_status kvant_write_begin(kvant_write *write, const kvant_rows *rows, size_t n_tensors,
                               const int64_t *slots, size_t n, uint32_t n_threads)
{
    kvant_status status = KVANT_OK;
    write->n_jobs = n_tensors;
    for (size_t i = 0; i < n_tensors; i++) {
        write->unshifted[i] = (kvant_unshifted){ 0 };
        write->jobs[i] = (kvant_write_job){ .tensor = rows[i].tensor,
                                            .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                                            .slots = slots,
                                            .rows = rows[i].rows,
                                            .seen = rows[i].seen,
                                            .n = n,
                                            .stride = rows[i].stride,
                                            .n_threads = n_threads,
                                            .runs = write->runs[i] };
        status = status == KVANT_OK ? check_arguments(&write->jobs[i]) : status;
        status = status == KVANT_OK ? unshift(&write->jobs[i], &write->unshifted[i]) : status;
    }
    return status == KVANT_OK ? begin(write->jobs, n_tensors) : status;
}

kvant_status kvant_write_close(kvant_write *write, kvant_status status)
{
    kvant_write_job *jobs = write->jobs;
    status = status == KVANT_OK ? end(jobs, write->n_jobs) : status;
    for (size_t i = 0; i < write->n_jobs; i++) {
        kvant_learning_written(jobs[i].tensor, jobs[i].slots, status == KVANT_OK ? jobs[i].n : 0);
        if (status != KVANT_OK && jobs[i].tensor && !jobs[i].tensor->recent.n)
            kvant_transforms_forget(jobs[i].tensor);
    }
    return status;
}

void kvant_write_release(kvant_write *write)
{
    for (size_t i = 0; i < write->n_jobs; i++)
        kvant_unshift_end(&write->unshifted[i]);
}

kvant_status kvant_write_end(kvant_write *write, kvant_status status)
{
    status = kvant_write_close(write, status);
    kvant_write_release(write);
    return status;
}

kvant_status kvant_tensor_write_seen(const kvant_rows *rows, size_t n_tensors, const int64_t *slots,
                                     size_t n, uint32_t n_threads)
{
    kvant_write write;
    const kvant_status status = kvant_write_begin(&write, rows, n_tensors, slots, n, n_threads);
    while (status == KVANT_OK && any_left(write.jobs, n_tensors)) {
        for (size_t i = 0; i < n_tensors; i++)
            kvant_write_place(&write.jobs[i]);
        kvant_write_encode(write.jobs, n_tensors);
        seal_between(write.jobs, n_tensors, false);
    }
    return kvant_write_end(&write, status);
}

kvant_status kvant_tensor_write(kvant_tensor *tensor, const int64_t *slots, size_t n,
                                const float *rows, size_t stride, uint32_t n_threads)
{
    const kvant_rows of = { tensor, rows, rows, stride };
    KVANT_RETURN_IF(tensor && tensor->device, KVANT_ERR_ARGUMENT);
    return kvant_tensor_write_seen(&of, 1, slots, n, n_threads);
}

kvant_status kvant_tensor_write_layer(kvant_tensor *k, kvant_tensor *v, const int64_t *slots,
                                      size_t n, const float *k_rows, size_t k_stride,
                                      const float *v_rows, size_t v_stride, uint32_t n_threads)
{
    const kvant_rows of[] = { { k, k_rows, k_rows, k_stride }, { v, v_rows, v_rows, v_stride } };
    KVANT_RETURN_IF(!k || !v || k == v || k->device || v->device ||
                        (k->steps && k->steps == v->steps),
                    KVANT_ERR_ARGUMENT);
    return kvant_tensor_write_seen(of, 2, slots, n, n_threads);
}
