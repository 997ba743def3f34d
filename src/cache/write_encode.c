/* write_encode.c - places the rows of a write and encodes them. It decides which transform a block
 * gets, which runs are placed together, and whether they go to open or sealed pages. Nothing here
 * can fail, because write.c has checked every row. */
#include "write.h"

#include "../base/attributes.h"
#include "../base/parallel.h"
#include "center.h"
#include "shift.h"
#include "key_transform.h"

/* Tokens of a page share words, so one thread encodes all blocks of a class. */
#define CLASSES 8u
#define ROWS_FOR_THREADS 16u /* with fewer rows, waking a thread costs more than encoding */
#define ROWS_AT_ONCE 4u      /* rows that are transformed together on the stack */

static uint32_t offset_of(const kvant_write_job *job, size_t i)
{
    return (uint32_t)(job->slots[i] % KVANT_PAGE_TOKENS);
}

kvant_run kvant_write_run(const kvant_write_job *job, size_t first)
{
    kvant_run r = { .first = first, .block = (uint32_t)(job->slots[first] / KVANT_PAGE_TOKENS) };
    for (size_t i = first; i < job->n && job->slots[i] / KVANT_PAGE_TOKENS == r.block; i++) {
        r.mask |= (uint64_t)1 << offset_of(job, i);
        r.n++;
    }
    return r;
}

/* Transforms */

/* The transform of a new block whose rows were not judged. */
static uint32_t transform_of_new(const kvant_tensor *tensor, uint32_t block)
{
    uint32_t transform_id = tensor->sequence_transforms[tensor->blocks[block].sequence];
    return tensor->transforms[transform_id].alive && tensor->transforms[transform_id].learned
               ? transform_id
               : tensor->newest;
}

/* The transform that the run's block gets. If the block's transform was rejected for the new rows,
 * the block changes to theirs. Rows that stay in the block are then quantised once more. */
uint32_t kvant_write_transform(const kvant_write_job *job, const kvant_run *r)
{
    const kvant_tensor *tensor = job->tensor;
    const kvant_block *block = &tensor->blocks[r->block];
    const bool *rejected = job->choice.selected ? job->choice.rejected : tensor->rejected;
    if (block->written & ~r->mask && !rejected[block->transform_id])
        return block->transform_id;
    return job->choice.selected ? job->choice.transform_id : transform_of_new(tensor, r->block);
}

/* The first position of the run's block. A block keeps its own when rows stay in its other
 * slots. */
int32_t kvant_write_position(const kvant_write_job *job, const kvant_run *r)
{
    const kvant_block *block = &job->tensor->blocks[r->block];
    return block->written & ~r->mask
               ? block->position
               : kvant_position_of_rows(job->tensor, job->slots, job->n, r->first, r->n);
}

bool kvant_write_opens(const kvant_tensor *tensor, uint32_t block, uint32_t transform_id)
{
    const kvant_block *b = &tensor->blocks[block];
    return tensor->always_open || kvant_is_sink(tensor, block) || b->open_page >= 0 ||
           (b->written ? transform_id != b->transform_id
                       : tensor->learns && !tensor->transforms[transform_id].learned);
}

/* Placing */

/* Whether the run needs an open page. A block whose rows are all replaced becomes a new block, so
 * that they are not decoded for an open page. */
static bool prepare_block(const kvant_write_job *job, const kvant_run *r)
{
    kvant_tensor *tensor = job->tensor;
    kvant_block *block = &tensor->blocks[r->block];
    const uint32_t transform_id = kvant_write_transform(job, r);
    const int32_t position = kvant_write_position(job, r);
    const bool differs = block->transform_id != transform_id || block->position != position;
    const bool opens = tensor->plan && block->open_page < 0;
    if (block->written && (differs || opens) && !(block->written & ~r->mask))
        kvant_block_clear(tensor, r->block);
    block->position = position;
    return tensor->plan && kvant_write_opens(tensor, r->block, transform_id);
}

/* Places a run. Opens the run's block if the plan gave it a page. */
static void place(const kvant_write_job *job, const kvant_run *r)
{
    kvant_tensor *tensor = job->tensor;
    kvant_block *block = &tensor->blocks[r->block];
    const uint32_t transform_id = kvant_write_transform(job, r);
    const bool open = block->open_page < 0 && kvant_write_opens(tensor, r->block, transform_id);
    if (block->open_page >= 0 && block->transform_id != transform_id)
        kvant_open_reexpress(tensor, r->block, transform_id);
    if (!block->written && block->open_page < 0)
        kvant_transforms_join(tensor, r->block, transform_id);
    if (open && !kvant_open_fill(tensor, r->block, transform_id, job->n_threads) &&
        tensor->always_open)
        kvant_open_block(tensor, r->block, block->transform_id, job->n_threads);
    kvant_centers_recall(tensor, r->block);
}

static void mark(const kvant_write_job *job, const kvant_run *r)
{
    kvant_tensor *tensor = job->tensor;
    kvant_block *block = &tensor->blocks[r->block];
    for (size_t i = r->first; job->shifts && i < r->first + r->n; i++)
        kvant_slot_set_shift(tensor, r->block, offset_of(job, i), job->shifts[i]);
    tensor->any_written = true;
    block->written |= r->mask;
    if (block->open_page >= 0) {
        kvant_open_mark_dirty(tensor, r);
    } else {
        block->resident = true;
        block->state = KVANT_BLOCK_SEALED;
    }
}

/* Encoding */

/* How many rows of the run from i on have slots that follow each other, at most ROWS_AT_ONCE. */
static uint32_t neighbours(const kvant_write_job *job, size_t i, size_t end)
{
    uint32_t n = 1;
    while (n < ROWS_AT_ONCE && i + n < end && job->slots[i + n] == job->slots[i] + n)
        n++;
    return n;
}

static void encode_rows(const kvant_write_job *job, const kvant_run *r, uint32_t head)
{
    kvant_tensor *tensor = job->tensor;
    const kvant_codec *codec = tensor->codecs[head];
    const kvant_block *block = &tensor->blocks[r->block];
    uint32_t d = tensor->head_dim;
    float room[KVANT_MAX_HEAD_DIM];
    kvant_affine affine = kvant_block_affine(tensor, r->block, block->transform_id, head, room);
    float y[ROWS_AT_ONCE * KVANT_MAX_HEAD_DIM];
    const kvant_transform *transform =
        kvant_tensor_head_transform(tensor, block->transform_id, head);
    if (block->open_page < 0)
        kvant_codec_fetch(codec, kvant_sealed_page(tensor, r->block, head));
    for (size_t i = r->first; i < r->first + r->n;) {
        uint32_t n = neighbours(job, i, r->first + r->n), offset = offset_of(job, i);
        kvant_codec_transform_rows(transform, job->kernels, &affine,
                                   job->rows + i * job->stride + (size_t)head * d, job->stride, n,
                                   y);
        if (block->open_page >= 0)
            kvant_codec_encode_open(codec, job->kernels, y, offset, n,
                                    kvant_open_page_of(tensor, block->open_page, head));
        else
            kvant_codec_encode_transformed(codec, job->kernels, y, offset, n,
                                           kvant_sealed_page(tensor, r->block, head));
        i += n;
    }
}

static size_t due_heads_of(const kvant_write_job *job)
{
    return job->tensor->due_slots ? job->tensor->n_kv_heads : 0;
}

static size_t heads_of(const kvant_write_job *job)
{
    return job->tensor->device ? 0 : (size_t)job->tensor->n_kv_heads * job->classes;
}

size_t kvant_write_new_bodies(const kvant_write_job *jobs, size_t n_jobs)
{
    size_t n = 0;
    for (size_t i = 0; i < n_jobs; i++)
        n += heads_of(&jobs[i]);
    return n;
}

size_t kvant_write_due_bodies(const kvant_write_job *jobs, size_t n_jobs)
{
    size_t n = 0;
    for (size_t i = 0; i < n_jobs; i++)
        n += due_heads_of(&jobs[i]);
    return n;
}

/* A body is a job, a kv head and a class. */
uint32_t kvant_write_encode_new(const kvant_write_job *jobs, size_t body)
{
    for (; body >= heads_of(jobs); jobs++)
        body -= heads_of(jobs);
    const uint32_t kv_head = (uint32_t)(body / jobs->classes);
    for (uint32_t i = 0; i < jobs->n_runs; i++)
        if (jobs->runs[i].block % jobs->classes == body % jobs->classes)
            encode_rows(jobs, &jobs->runs[i], kv_head);
    return kv_head;
}

void kvant_write_encode_due(const kvant_write_job *jobs, size_t body)
{
    for (; body >= due_heads_of(jobs); jobs++)
        body -= due_heads_of(jobs);
    kvant_open_encode_due(jobs->tensor, (uint32_t)body);
}

void kvant_write_encoded(kvant_write_job *jobs, size_t n_jobs)
{
    for (size_t i = 0; i < n_jobs; i++)
        jobs[i].tensor->due_slots = 0;
}

typedef struct encode_work {
    const kvant_write_job *jobs;
    size_t n_due;
} encode_work;

/* Rows that were due for sealing come first, because that takes longest. */
static void encode_body(void *context, size_t body, uint32_t worker)
{
    const encode_work *work = context;
    (void)worker;
    if (body < work->n_due)
        kvant_write_encode_due(work->jobs, body);
    else
        (void)kvant_write_encode_new(work->jobs, body - work->n_due);
}

static bool worth_threads(const kvant_write_job *job, size_t rows)
{
    return rows >= ROWS_FOR_THREADS ||
           (kvant_parallel_is_lent() && kvant_codec_encodes_slowly(job->tensor->codecs[0]));
}

/* Encodes the runs of all jobs, and the rows that were due for sealing. */
void kvant_write_encode(kvant_write_job *jobs, size_t n_jobs)
{
    encode_work work = { jobs, kvant_write_due_bodies(jobs, n_jobs) };
    bool threads = work.n_due && kvant_parallel_is_lent();
    for (kvant_write_job *job = jobs; job < jobs + n_jobs; job++) {
        const kvant_batch batch = { job->slots, job->rows, job->stride, job->runs, job->n_runs };
        if (job->tensor->device && job->n_runs)
            job->tensor->device->encode(job->tensor, &batch);
        threads |= worth_threads(job, job->n_placed);
    }
    kvant_parallel_for(work.n_due + kvant_write_new_bodies(jobs, n_jobs),
                       threads ? jobs->n_threads : 1, encode_body, &work);
    kvant_write_encoded(jobs, n_jobs);
}

static bool has_run_for(const kvant_write_job *job, uint32_t block)
{
    for (uint32_t i = 0; i < job->n_runs; i++)
        if (job->runs[i].block == block)
            return true;
    return false;
}

/* Places runs of the remaining rows, each for a different block, and no more runs than can have
 * open pages at once. */
void kvant_write_place(kvant_write_job *job)
{
    kvant_tensor *tensor = job->tensor;
    kvant_run open[KVANT_MOST_RUNS];
    const uint32_t n_pages = tensor->n_open_pages - tensor->n_absent_pages;
    uint32_t n_open = 0, n_new = 0;
    size_t end = job->done;
    for (job->n_runs = 0; job->n_runs < KVANT_MOST_RUNS && end < job->n; job->n_runs++) {
        kvant_run r = kvant_write_run(job, end);
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
    kvant_open_acquire_runs(tensor, open, n_open, job->n_threads);
    for (uint32_t i = 0; i < job->n_runs; i++) {
        place(job, &job->runs[i]);
        mark(job, &job->runs[i]);
    }
    job->classes = job->n_runs < CLASSES ? job->n_runs : CLASSES;
    job->n_placed = end - job->done;
    job->done = end;
}

/* Sets the transform with which the next block of each sequence begins. It must not run before all
 * rows are placed, because they were checked for the transforms that they would get before the
 * write. If RoPE is known, a transform that was made for a few tokens serves the tokens after
 * them. */
void kvant_write_note_transforms(const kvant_write_job *job)
{
    const bool rotates = kvant_learning_knows_rope(job->tensor);
    for (size_t first = 0; first < job->n && (job->choice.selected || !rotates);) {
        kvant_run r = kvant_write_run(job, first);
        const kvant_block *block = &job->tensor->blocks[r.block];
        job->tensor->sequence_transforms[block->sequence] =
            rotates ? job->choice.transform_id : block->transform_id;
        first += r.n;
    }
}
