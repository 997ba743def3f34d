/* write.c - turns a batch of rows into codes: checks all rows, chooses versions, places rows,
 * encodes them.
 *
 * A run is a stretch of neighbouring rows of the batch that go to one block. After the check
 * nothing can fail. A row for an open page is also checked for the sealed page that follows. */
#include <float.h>
#include <math.h>
#include <stdatomic.h>

#include "../base/attributes.h"
#include "../base/parallel.h"
#include "center.h"
#include "learning.h"
#include "shift.h"
#include "weights.h"

#define CLASSES 8u            /* tokens of a page share words, so blocks of one class are one thread's */
#define ROWS_FOR_THREADS 16u  /* below, waking a thread costs more than encoding */
#define ROWS_AT_ONCE 4u       /* transformed on the stack */

typedef struct write_job {
    kvant_tensor *tensor;
    const kvant_kernels *kernels;
    const int64_t *slots;
    const float *rows; /* where the tensor's pages are */
    const float *seen; /* on the host, or NULL: known to fit */
    size_t n, stride;
    uint32_t n_threads;
    const uint8_t *shifts; /* numbers that the rows' slots get (shift.h), or NULL */
    kvant_choice choice;
    bool undoable;         /* learn: another tensor's failure takes it back */
    bool forgets, resets;  /* what follows when nothing fails: noted rows are done with, sums begin again */
    kvant_kept *kept;          /* the learning before this write, or NULL */
    kvant_run runs[KVANT_MOST_RUNS]; /* of the rows before `done`, the last n_placed */
    uint32_t n_runs, classes;
    size_t done, n_placed;
    atomic_int status;
} write_job;

static uint32_t offset_of(const write_job *job, size_t i)
{
    return (uint32_t)(job->slots[i] % KVANT_PAGE_TOKENS);
}

static kvant_run run_from(const write_job *job, size_t first)
{
    kvant_run r = { .first = first, .block = (uint32_t)(job->slots[first] / KVANT_PAGE_TOKENS) };
    for (size_t i = first; i < job->n && job->slots[i] / KVANT_PAGE_TOKENS == r.block; i++) {
        r.mask |= (uint64_t)1 << offset_of(job, i);
        r.n++;
    }
    return r;
}

/* Versions */

/* The version of a block that nobody judged. */
static uint32_t version_of_new(const kvant_tensor *tensor, uint32_t block)
{
    uint32_t version = tensor->sequence_versions[tensor->blocks[block].sequence];
    return tensor->versions[version].alive && tensor->versions[version].learnt ? version : tensor->newest;
}

/* A block that rows of another kind were written to before takes their version with its first new
 * row: what is left of the old rows, if anything, is quantised once more. */
static uint32_t version_for(const write_job *job, const kvant_run *r)
{
    const kvant_tensor *tensor = job->tensor;
    const kvant_block *block = &tensor->blocks[r->block];
    const bool *unfit = job->choice.judged ? job->choice.unfit : tensor->unfit;
    if (block->written & ~r->mask && !unfit[block->version])
        return block->version;
    return job->choice.judged ? job->choice.version : version_of_new(tensor, r->block);
}

/* The first position of the run's block. One that rows of its other slots stay in keeps its own. */
static int32_t position_for(const write_job *job, const kvant_run *r)
{
    const kvant_block *block = &job->tensor->blocks[r->block];
    return block->written & ~r->mask ? block->position : kvant_position_of_rows(job->tensor, job->slots, job->n, r->first, r->n);
}

/* Checking */

static bool goes_through_open(const kvant_tensor *tensor, uint32_t block, uint32_t version)
{
    const kvant_block *b = &tensor->blocks[block];
    return tensor->always_open || kvant_is_sink(tensor, block) || b->open_page >= 0 ||
           (b->written ? version != b->version : tensor->learns && !tensor->versions[version].learnt);
}

static kvant_status check_run(const write_job *job, const kvant_run *r, uint32_t head, uint32_t version)
{
    const kvant_tensor *tensor = job->tensor;
    const kvant_codec *codec = tensor->codecs[head];
    float room[KVANT_MAX_HEAD_DIM];
    kvant_affine affine = kvant_affine_at(tensor, version, head, position_for(job, r), room);
    const float *rows = job->seen + r->first * job->stride + (size_t)head * tensor->head_dim;
    const kvant_transform *transform = kvant_version_transform(tensor, version, head);
    const bool open = goes_through_open(tensor, r->block, version);
    if (tensor->half_rows && !open)
        KVANT_FORWARD(kvant_codec_check_rows(codec, transform, job->kernels, &affine, rows,
                                             job->stride, r->n, true));
    return kvant_codec_check_rows(codec, transform, job->kernels, &affine, rows, job->stride, r->n,
                                  open);
}

/* A block may keep its version when its rows do not fit the one it should get. */
static kvant_status check_head(const write_job *job, uint32_t head)
{
    for (size_t first = 0; first < job->n;) {
        kvant_run r = run_from(job, first);
        uint32_t version = version_for(job, &r), own = job->tensor->blocks[r.block].version;
        KVANT_FORWARD(check_run(job, &r, head, version));
        if (job->tensor->blocks[r.block].written && own != version)
            KVANT_FORWARD(check_run(job, &r, head, own));
        first += r.n;
    }
    return KVANT_OK;
}

static void check_unit(void *context, size_t head, uint32_t worker)
{
    write_job *job = context;
    kvant_status status = check_head(job, (uint32_t)head);
    (void)worker;
    if (status != KVANT_OK)
        atomic_store_explicit(&job->status, (int)status, memory_order_relaxed);
}

/* Rows that a device has are looked at where a new version may not fit them. */
static void see(write_job *job)
{
    if (!job->seen && job->choice.judged && !kvant_versions_fit(job->tensor, job->choice.version))
        job->seen = job->tensor->device->look(job->tensor, job->rows, job->stride, job->n);
}

/* Rows can be written with the versions that blocks have, or get without a judgement. Before anything is
 * learnt: no memory leaves everything as it was. */
static kvant_status prepare(const write_job *job)
{
    kvant_tensor *tensor = job->tensor;
    if (job->n) {
        KVANT_FORWARD(kvant_versions_open(tensor));
        KVANT_FORWARD(kvant_learning_open(tensor));
    }
    for (size_t first = 0; tensor->learning && !tensor->device && first < job->n;) {
        const kvant_run r = run_from(job, first);
        KVANT_FORWARD(kvant_version_prepare(tensor, version_for(job, &r)));
        KVANT_FORWARD(kvant_version_prepare(tensor, tensor->blocks[r.block].version));
        first += r.n;
    }
    return KVANT_OK;
}

static kvant_status check_all(write_job *job)
{
    see(job);
    if (!job->seen)
        return KVANT_OK;
    atomic_store(&job->status, KVANT_OK);
    kvant_parallel_for(job->tensor->n_kv_heads, job->n >= ROWS_FOR_THREADS ? job->n_threads : 1, check_unit, job);
    return (kvant_status)atomic_load(&job->status);
}

/* Placing */

/* Whether the run needs an open page. A block that gets other rows in place of all that it has
 * begins anew. */
static bool prepare_block(const write_job *job, const kvant_run *r)
{
    kvant_tensor *tensor = job->tensor;
    kvant_block *block = &tensor->blocks[r->block];
    const uint32_t version = version_for(job, r);
    const int32_t position = position_for(job, r);
    if (block->written && (block->version != version || block->position != position) && !(block->written & ~r->mask))
        kvant_block_clear(tensor, r->block);
    block->position = position;
    return tensor->plan && goes_through_open(tensor, r->block, version);
}

/* Opens the run's block when the plan gave it a page. */
static void place(const write_job *job, const kvant_run *r)
{
    kvant_tensor *tensor = job->tensor;
    kvant_block *block = &tensor->blocks[r->block];
    const uint32_t version = version_for(job, r);
    const bool open = block->open_page < 0 && goes_through_open(tensor, r->block, version);
    if (block->open_page >= 0 && block->version != version)
        kvant_open_reexpress(tensor, r->block, version);
    if (!block->written && block->open_page < 0)
        kvant_version_join(tensor, r->block, version);
    if (open && !kvant_open_fill(tensor, r->block, version, job->n_threads) && tensor->always_open)
        kvant_open_block(tensor, r->block, block->version, job->n_threads);
    kvant_centers_recall(tensor, r->block);
}

static void mark(const write_job *job, const kvant_run *r)
{
    kvant_tensor *tensor = job->tensor;
    kvant_block *block = &tensor->blocks[r->block];
    for (size_t i = r->first; job->shifts && i < r->first + r->n; i++)
        kvant_slot_set_shift(tensor, r->block, offset_of(job, i), job->shifts[i]);
    tensor->any_written = true;
    block->written |= r->mask;
    if (block->open_page >= 0) {
        kvant_open_touch(tensor, r->block, r->mask);
    } else {
        block->touched = true;
        block->state = KVANT_BLOCK_SEALED;
    }
}

/* Encoding */

/* Rows of the run from i on, at most ROWS_AT_ONCE, whose slots follow each other. */
static uint32_t neighbours(const write_job *job, size_t i, size_t end)
{
    uint32_t n = 1;
    while (n < ROWS_AT_ONCE && i + n < end && job->slots[i + n] == job->slots[i] + n)
        n++;
    return n;
}

/* The page that rows will enter once they are quantised, and that attention will read: searches take
 * longer than memory does. */
KVANT_INLINE void fetch_sealed(const kvant_tensor *tensor, uint32_t block, uint32_t head)
{
    const uint8_t *page = kvant_sealed_page(tensor, block, head);
    for (size_t i = 0; i < tensor->codecs[head]->info.page_bytes; i += 64)
        KVANT_PREFETCH(page + i);
}

static void encode_rows(const write_job *job, const kvant_run *r, uint32_t head)
{
    kvant_tensor *tensor = job->tensor;
    const kvant_codec *codec = tensor->codecs[head];
    const kvant_block *block = &tensor->blocks[r->block];
    uint32_t d = tensor->head_dim;
    float room[KVANT_MAX_HEAD_DIM];
    kvant_affine affine = kvant_block_affine(tensor, r->block, block->version, head, room);
    float y[ROWS_AT_ONCE * KVANT_MAX_HEAD_DIM];
    const kvant_transform *transform = kvant_version_transform(tensor, block->version, head);
    if (block->open_page < 0 && kvant_codec_encodes_slowly(codec))
        fetch_sealed(tensor, r->block, head);
    for (size_t i = r->first; i < r->first + r->n;) {
        uint32_t n = neighbours(job, i, r->first + r->n), offset = offset_of(job, i);
        kvant_codec_transform_rows(transform, job->kernels, &affine,
                                   job->rows + i * job->stride + (size_t)head * d, job->stride, n, y);
        if (block->open_page >= 0)
            kvant_codec_encode_open(codec, job->kernels, y, offset, n,
                                    kvant_open_page_of(tensor, block->open_page, head));
        else
            kvant_codec_encode_transformed(codec, job->kernels, y, offset, n,
                                           kvant_sealed_page(tensor, r->block, head));
        i += n;
    }
}

static size_t units_of(const write_job *job)
{
    return job->tensor->device ? 0 : (size_t)job->tensor->n_kv_heads * job->classes;
}

/* Of the jobs of a write: units are (job, kv head, class). */
static void encode_unit(void *jobs, size_t unit, uint32_t worker)
{
    const write_job *job = jobs;
    (void)worker;
    for (; unit >= units_of(job); job++)
        unit -= units_of(job);
    for (uint32_t i = 0; i < job->n_runs; i++)
        if (job->runs[i].block % job->classes == unit % job->classes)
            encode_rows(job, &job->runs[i], (uint32_t)(unit / job->classes));
}

static bool worth_threads(const write_job *job, size_t rows)
{
    return rows >= ROWS_FOR_THREADS || (kvant_parallel_is_lent() && kvant_codec_encodes_slowly(job->tensor->codecs[0]));
}

/* The runs of all jobs. */
static void encode_placed(write_job *jobs, size_t n_jobs)
{
    size_t n_units = 0;
    bool threads = false;
    for (write_job *job = jobs; job < jobs + n_jobs; job++) {
        const kvant_batch batch = { job->slots, job->rows, job->stride, job->runs, job->n_runs };
        if (job->tensor->device && job->n_runs)
            job->tensor->device->encode(job->tensor, &batch);
        job->classes = job->n_runs < CLASSES ? job->n_runs : CLASSES;
        n_units += units_of(job);
        threads |= worth_threads(job, job->n_placed);
    }
    kvant_parallel_for(n_units, threads ? jobs->n_threads : 1, encode_unit, jobs);
}

static bool has_run_for(const write_job *job, uint32_t block)
{
    for (uint32_t i = 0; i < job->n_runs; i++)
        if (job->runs[i].block == block)
            return true;
    return false;
}

/* Places runs of what is left, each for another block: no more than can have open pages at once. */
static void place_some(write_job *job)
{
    kvant_tensor *tensor = job->tensor;
    kvant_run open[KVANT_MOST_RUNS];
    const uint32_t n_pages = tensor->n_open_pages - tensor->n_absent_pages;
    uint32_t n_open = 0, n_new = 0;
    size_t end = job->done;
    for (job->n_runs = 0; job->n_runs < KVANT_MOST_RUNS && end < job->n; job->n_runs++) {
        kvant_run r = run_from(job, end);
        if (has_run_for(job, r.block) || n_new == tensor->step_blocks ||
            (n_open > 0 && n_open == n_pages))
            break;
        const bool opens = prepare_block(job, &r);
        kvant_open_count(tensor, &r);
        n_new += opens && tensor->blocks[r.block].open_page < 0;
        if (opens)
            open[n_open++] = r;
        job->runs[job->n_runs] = r;
        end += r.n;
    }
    kvant_open_take_runs(tensor, open, n_open, job->n_threads);
    for (uint32_t i = 0; i < job->n_runs; i++) {
        place(job, &job->runs[i]);
        mark(job, &job->runs[i]);
    }
    job->n_placed = end - job->done;
    job->done = end;
}

/* The version that the next block of each sequence begins with. Not before all rows are placed:
 * they were checked for the versions that they would get before the write. Where keys turn, a version
 * that a few tokens were judged to need is for the tokens after them. */
static void note_versions(const write_job *job)
{
    const bool turns = kvant_learning_follows(job->tensor);
    for (size_t first = 0; first < job->n && (job->choice.judged || !turns);) {
        kvant_run r = run_from(job, first);
        const kvant_block *block = &job->tensor->blocks[r.block];
        job->tensor->sequence_versions[block->sequence] = turns ? job->choice.version : block->version;
        first += r.n;
    }
}

/* Learning */

/* Whether rows that wait for the first version would push others out of the open pages, sinks and
 * their pages not counted. */
static bool pages_are_short(const write_job *job)
{
    const kvant_tensor *tensor = job->tensor;
    uint32_t needed = tensor->n_sink_pages;
    if (!kvant_versions_wait(tensor))
        return false;
    for (uint32_t i = 0; i < tensor->n_open_pages; i++) {
        const int64_t block = tensor->open_pages[i].block;
        needed += block >= 0 && !kvant_is_sink(tensor, (uint32_t)block);
    }
    for (size_t first = 0; first < job->n;) {
        kvant_run r = run_from(job, first);
        needed += tensor->blocks[r.block].open_page < 0 && !kvant_is_sink(tensor, r.block);
        first += r.n;
    }
    return needed > tensor->n_open_pages;
}

static bool all_finite(const write_job *job)
{
    size_t width = kvant_tensor_width(job->tensor);
    for (size_t i = 0; job->seen && i < job->n; i++)
        if (job->kernels->magnitude(job->seen + i * job->stride, (uint32_t)width) >= 0x7f800000u)
            return false;
    return true;
}

/* A long batch is judged by itself, before its rows are checked for the versions they will have. */
static bool judged_alone(const write_job *job)
{
    return job->tensor->learns && job->n >= KVANT_LEARN_ROWS;
}

/* Finds the faults of rows that can be found before any tensor learns from them. */
static kvant_status check_first(const write_job *job)
{
    KVANT_FORWARD(prepare(job));
    return judged_alone(job) && !all_finite(job) ? KVANT_ERR_NONFINITE : KVANT_OK;
}

static kvant_status check_job(write_job *job)
{
    if (judged_alone(job)) {
        const kvant_new_rows rows = { job->rows, job->stride, job->n, job->slots };
        job->choice = kvant_versions_judge(job->tensor, &rows, job->n_threads);
        KVANT_FORWARD(job->choice.status);
    }
    return check_all(job);
}

static bool keep(write_job *job)
{
    if (!job->undoable)
        return true;
    kvant_learning_spread(job->tensor, job->n_threads);
    job->kept = kvant_sums_keep(job->tensor);
    return job->kept != NULL;
}

/* What came before a long batch is forgotten; short ones are judged together. Not before every row
 * of the write is checked: rows that are refused leave no trace. */
static kvant_status learn(write_job *job)
{
    if (!job->tensor->learns)
        return KVANT_OK;
    if (!judged_alone(job)) {
        const kvant_new_rows rows = { job->rows, job->stride, job->n, job->slots };
        const bool judged =
            job->tensor->recent.n + job->n >= KVANT_LEARN_ROWS || pages_are_short(job);
        kvant_versions_note(job->tensor, &rows, judged || job->undoable);
        if (!judged)
            return KVANT_OK;
        job->choice.status = KVANT_ERR_MEMORY;
        if (keep(job))
            job->choice = kvant_versions_judge_noted(job->tensor, job->n_threads);
        if (job->choice.status != KVANT_OK) {
            kvant_versions_unnote(job->tensor);
            return job->choice.status;
        }
        job->resets = check_all(job) != KVANT_OK;
        job->choice.judged = job->choice.judged && !job->resets;
    }
    job->forgets = true;
    return KVANT_OK;
}

static void undo(const write_job *job)
{
    if (judged_alone(job))
        return;
    if (job->kept)
        kvant_sums_restore(job->tensor, job->kept);
    kvant_weights_free(&job->tensor->versions[KVANT_CANDIDATE].weights);
    kvant_versions_unnote(job->tensor);
}

/* Learning needs memory where there are matrices. No choice is in force until every tensor has
 * learned, so a write that fails for values leaves keys unchanged. */
static kvant_status learn_all(write_job *jobs, size_t n_jobs)
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
        kvant_sums_drop(jobs[i].kept);
        if (status == KVANT_OK && jobs[i].resets)
            kvant_learning_reset(jobs[i].tensor);
        if (status == KVANT_OK && jobs[i].forgets)
            kvant_versions_forget(jobs[i].tensor);
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
    for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++)
        for (uint32_t head = 0; tensor->versions[v].alive && head < tensor->n_kv_heads; head++) {
            float room[KVANT_MAX_HEAD_DIM];
            const kvant_affine affine = kvant_affine_widest(tensor, v, head, room);
            least = fminf(least, kvant_codec_safe_input(kvant_version_transform(tensor, v, head), kernels, &affine));
        }
    return least;
}

static kvant_status check_arguments(const write_job *job)
{
    const kvant_tensor *tensor = job->tensor;
    KVANT_RETURN_IF(!tensor || !job->slots || !job->rows || !job->n_threads, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(job->n > 1 && job->stride < kvant_tensor_width(tensor), KVANT_ERR_ARGUMENT);
    return valid_slots(tensor, job->slots, job->n) ? KVANT_OK : KVANT_ERR_ARGUMENT;
}

static bool any_left(const write_job *jobs, size_t n_jobs)
{
    for (size_t i = 0; i < n_jobs; i++)
        if (jobs[i].done < jobs[i].n)
            return true;
    return false;
}

/* Seals what is old: by the rows before the write, where there is an exact part, so that queries of
 * the same step see the rows of this write as they came; otherwise by the rows placed last, too. */
static void seal_between(write_job *jobs, size_t n_jobs, bool begins)
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
        if (!now || kvant_versions_wait(tensor))
            continue;
        if (tensor->step_rows || tensor->always_open)
            due[n_due++] = tensor;
        else
            kvant_open_seal_due(&tensor, 1, true, jobs[i].n_threads);
    }
    if (n_due)
        kvant_open_seal_due(due, n_due, false, jobs->n_threads);
}

static kvant_status run(write_job *jobs, size_t n_jobs)
{
    kvant_status status = KVANT_OK;
    for (size_t i = 0; i < n_jobs && status == KVANT_OK; i++) {
        kvant_versions_age(jobs[i].tensor, jobs[i].n);
        status = check_first(&jobs[i]);
    }
    for (size_t i = 0; i < n_jobs && status == KVANT_OK; i++)
        status = check_job(&jobs[i]);
    for (size_t i = 0; i < n_jobs && status != KVANT_OK; i++)
        if (jobs[i].choice.judged && jobs[i].choice.status == KVANT_OK) /* else it is as it was */
            kvant_learning_reset(jobs[i].tensor);
    KVANT_FORWARD(status);
    KVANT_FORWARD(learn_all(jobs, n_jobs));
    seal_between(jobs, n_jobs, true);
    while (any_left(jobs, n_jobs)) {
        for (size_t i = 0; i < n_jobs; i++)
            place_some(&jobs[i]);
        encode_placed(jobs, n_jobs);
        seal_between(jobs, n_jobs, false);
    }
    for (size_t i = 0; i < n_jobs && status == KVANT_OK; i++) {
        kvant_open_end(jobs[i].tensor, jobs[i].slots, jobs[i].n);
        note_versions(&jobs[i]);
        status = kvant_pages_status(jobs[i].tensor);
    }
    return status;
}

/* Rows for slots whose keys were shifted are stored as they were before the shift. */
static kvant_status unshift(write_job *job, kvant_unshifted *unshifted)
{
    KVANT_FORWARD(
        kvant_unshift(job->tensor, job->slots, job->n, job->rows, job->stride, unshifted));
    job->shifts = unshifted->numbers;
    if (unshifted->rows) {
        job->rows = job->seen = unshifted->rows;
        job->stride = kvant_tensor_width(job->tensor);
    }
    return KVANT_OK;
}

kvant_status kvant_tensor_write_seen(const kvant_rows *rows, size_t n_tensors, const int64_t *slots, size_t n,
                                     uint32_t n_threads)
{
    write_job jobs[2];
    kvant_unshifted unshifted[2] = { { 0 } };
    kvant_status status = KVANT_OK;
    for (size_t i = 0; i < n_tensors && status == KVANT_OK; i++) {
        jobs[i] = (write_job){ .tensor = rows[i].tensor,
                               .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                               .slots = slots,
                               .rows = rows[i].rows,
                               .seen = rows[i].seen,
                               .n = n,
                               .stride = rows[i].stride,
                               .n_threads = n_threads };
        status = check_arguments(&jobs[i]);
        status = status == KVANT_OK ? unshift(&jobs[i], &unshifted[i]) : status;
    }
    status = status == KVANT_OK ? run(jobs, n_tensors) : status;
    for (size_t i = 0; i < n_tensors; i++)
        kvant_learning_written(rows[i].tensor, slots, status == KVANT_OK ? n : 0);
    for (size_t i = 0; i < n_tensors; i++)
        kvant_unshift_end(&unshifted[i]);
    for (size_t i = 0; i < n_tensors && status != KVANT_OK; i++)
        if (rows[i].tensor && !rows[i].tensor->recent.n)
            kvant_versions_forget(rows[i].tensor);
    return status;
}

kvant_status kvant_tensor_write(kvant_tensor *tensor, const int64_t *slots, size_t n, const float *rows,
                                size_t stride, uint32_t n_threads)
{
    const kvant_rows of = { tensor, rows, rows, stride };
    KVANT_RETURN_IF(tensor && tensor->device, KVANT_ERR_ARGUMENT);
    return kvant_tensor_write_seen(&of, 1, slots, n, n_threads);
}

kvant_status kvant_tensor_write_layer(kvant_tensor *k, kvant_tensor *v, const int64_t *slots, size_t n,
                                      const float *k_rows, size_t k_stride, const float *v_rows, size_t v_stride,
                                      uint32_t n_threads)
{
    const kvant_rows of[] = { { k, k_rows, k_rows, k_stride }, { v, v_rows, v_rows, v_stride } };
    KVANT_RETURN_IF(!k || !v || k == v || k->device || v->device || (k->steps && k->steps == v->steps),
                    KVANT_ERR_ARGUMENT);
    return kvant_tensor_write_seen(of, 2, slots, n, n_threads);
}
