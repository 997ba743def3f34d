/* learner.c - see learner.h.
 *
 * One CPU is left to the GPU's caller. Threads have a low priority unless a prompt waits for them:
 * on a busy machine it would wait for all programs of a higher one. */
#include "learner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "../host.h"
#include "../log.h"
#include "../rope.h"

#define MOST_AT_ONCE 7 /* layers: more disturb a GPU's caller that decodes tokens */

/* The C library keeps 40 MiB of stacks for new threads. With this size it keeps a stack for each
 * layer. With the usual 8 MiB a prompt would map and unmap most of them, and each time stop all
 * threads. */
#define STACK ((size_t)1 << 20)

static pthread_once_t counted = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* Threads that wait to learn: at most `most` learn at once. They begin in the order of their
 * tickets, because a prompt waits for the first layer first. On a busy machine threads would begin
 * in any order. */
typedef struct queue {
    uint32_t most, n_tickets, n_over;
} queue;

static queue at_once, hurried; /* lessons that hurry have a separate queue */

/* First lessons that hurry and are not over. A thread that makes a transform ahead of time waits
 * for them until somebody asks for its transform, because prompts need first transforms sooner. */
static uint32_t n_firsts;

static void add(uint32_t *number, int by)
{
    pthread_mutex_lock(&lock);
    *number += (uint32_t)by;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void set_ahead(kvp_gpu_learner *l, bool ahead)
{
    pthread_mutex_lock(&lock);
    l->ahead = ahead;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void wait_for_firsts(const kvp_gpu_learner *l)
{
    pthread_mutex_lock(&lock);
    while (n_firsts > 0 && l->ahead)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

/* The caller of a GPU that computes a prompt has little to do: it leaves all CPUs but one. */
static void count_cpus(void)
{
    const uint32_t all = kvant_available_cpus() - 1, n = all < 1 ? 1 : all;

    hurried.most = n;
    at_once.most = n > MOST_AT_ONCE ? MOST_AT_ONCE : n;
}

/* A thread with a ticket waits in the queue and adds itself to n_over at its end. Otherwise later
 * threads would wait forever. */
static uint32_t take_ticket(queue *of)
{
    uint32_t ticket;

    pthread_mutex_lock(&lock);
    ticket = of->n_tickets++;
    pthread_mutex_unlock(&lock);
    return ticket;
}

static void wait_in(const queue *of, uint32_t ticket)
{
    pthread_mutex_lock(&lock);
    while ((int32_t)(ticket - of->n_over) >= (int32_t)of->most) /* both may wrap around */
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

void kvp_gpu_learner_drop(const kvp_gpu_cells *cells, kvp_gpu_learner *l)
{
    kvant_cuda_codec_free(&l->open);
    kvant_cuda_codec_free(&l->sealed);
    kvp_gpu_free_codecs(l->made.codecs, cells->n_kv_heads);
    free(l->made.start);
    free(l->made.kept);
    l->made = (kvp_gpu_learned_transform){ 0 };
    l->brought = false;
}

void kvp_gpu_learner_finish(kvp_gpu_learner *l)
{
    if (l->runs)
        pthread_join(l->thread, NULL);
    l->runs = false;
}

static void finish_maker(kvp_gpu_learner *l)
{
    set_ahead(l, false);
    if (l->maker_runs)
        pthread_join(l->maker, NULL);
    l->maker_runs = false;
}

void kvp_gpu_learner_finish_all(kvp_gpu_learner *l)
{
    kvp_gpu_learner_finish(l); /* first, because this thread may start the maker */
    finish_maker(l);
}

void kvp_gpu_learner_begin(kvp_gpu_cells *cells)
{
    if (cells->learner != NULL && !cells->learner->begun)
        return; /* the learner is as good as new */
    kvp_gpu_learner_free(cells);
    pthread_once(&counted, count_cpus);
    cells->learner = calloc(1, sizeof(*cells->learner));
}

void kvp_gpu_learner_free(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    if (l == NULL)
        return;
    atomic_store(&l->dropped, true);
    kvp_gpu_learner_finish_all(l); /* first, because threads use the learner in cells */
    cells->learner = NULL;
    kvp_gpu_learner_drop(cells, l);
    free(l->bucket_kept);
    kvant_tensor_free(&l->tensor);
    kvant_codec_free(&l->codec);
    kvp_gpu_lesson_free(&l->lesson);
    if (l->ready != NULL)
        kvp_cu.event_free(l->ready);
    kvant_os_free(l->memory);
    free(l);
}

void kvp_gpu_learner_set_rope(const kvp_kv *kv, const abi_tensor *rows)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_learner *l = cells->learner;
    const uint32_t all = kvp_kv_n_positions(kv), first = (uint32_t)kvant_lesson_bucket_at(1).from;

    if (l == NULL || l->rope_is_set)
        return;
    l->rope_is_set = true;
    l->begins = kvant_lesson_in_first_bucket(&cells->cache->buckets.lessons);
    if (!kvp_rope_read(kv, rows, &l->rope, l->frequencies)) {
        l->rope.size = 0;
        kvp_note("%s: its RoPE is not known, so matrices are learned without it", kv->name);
        return;
    }
    l->has_block_centers = kvp_gpu_centers_set_rope(kv, rows);
    l->rope.frequencies = l->frequencies;
    l->rope.n_positions = l->begins && all > first ? first : all;
    l->rope.n_position_transforms = 1;
    l->rope.block_centers = l->has_block_centers;
}

/* The tensor */

/* Creates the tensor that learns. Its block 0 is for first tokens of sequences, which are fp16 and
 * not learned from. */
static bool create_tensor(kvp_gpu_learner *l, const kvp_gpu_cells *cells)
{
    kvant_codec_info info = { .size = sizeof(info) };
    const kvant_codec **codecs = malloc(cells->n_kv_heads * sizeof(*codecs));
    kvant_tensor_params params = { .size = sizeof(params),
                                   .codecs = codecs,
                                   .n_kv_heads = cells->n_kv_heads,
                                   .n_sequences = 1,
                                   .n_blocks = KVANT_LEARN_BATCH_ROWS / KVANT_PAGE_TOKENS + 1 };
    char spec[64];
    size_t bytes = 0;
    bool ok;

    kvant_codec_get_info(cells->sources[0], &info);
    snprintf(spec, sizeof(spec), "int-8:transform=first,rotate=none,sink=%u",
             (unsigned)info.sink_tokens);
    ok = codecs != NULL &&
         kvant_codec_create(spec, cells->head_dim, info.role, 0, &l->codec, NULL, 0) == KVANT_OK;
    for (uint32_t head = 0; ok && head < cells->n_kv_heads; head++)
        codecs[head] = l->codec;
    ok = ok && kvant_tensor_size(&params, &bytes) == KVANT_OK;
    l->memory = ok ? kvant_os_alloc(KVANT_PAGE_ALIGN, (bytes + KVANT_PAGE_ALIGN - 1) /
                                                          KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN)
                   : NULL;
    if (l->memory != NULL)
        memset(l->memory, 0, bytes);
    ok = l->memory != NULL && kvant_tensor_create(&params, l->memory, &l->tensor) == KVANT_OK;
    free(codecs);
    if (ok && l->rope.size != 0 && kvant_tensor_set_rope(l->tensor, &l->rope) != KVANT_OK)
        l->has_block_centers =
            false; /* RoPE is for another number of channels than the tensor has */
    return ok;
}

/* Copies n numbers that work wrote which was enqueued before the lesson began. */
static bool copy_out(const kvp_gpu_cells *cells, float *to, const void *from, size_t n, bool halves)
{
    return kvp_gpu_enter(cells->gpu) &&
           kvp_cu_ok(kvp_cu.event_finish(cells->learner->ready), "copying") &&
           kvp_gpu_copy_numbers(cells->gpu, to, from, n, halves);
}

/* Makes queries whose directions are equally distributed, for layers without kept queries. */
static void assume_queries(const kvp_gpu_cells *cells, float *queries, int32_t *positions)
{
    kvant_learn_assume_queries(queries, KVP_KEPT_TOKENS * kvp_gpu_width(cells));
    for (uint32_t i = 0; i < KVP_KEPT_TOKENS; i++)
        positions[i] = (int32_t)i;
}

static bool note_batch(const kvp_gpu_cells *cells, const float *rows, size_t row,
                       const int32_t *positions)
{
    const kvant_queries queries = { .size = sizeof(queries),
                                    .q = rows,
                                    .token_stride = row / sizeof(*rows),
                                    .head_stride = cells->head_dim,
                                    .n_tokens = KVP_KEPT_TOKENS,
                                    .n_heads = (uint32_t)(row / sizeof(*rows) / cells->head_dim),
                                    .positions = positions[0] >= 0 ? positions : NULL };

    return kvant_tensor_note_queries(cells->learner->tensor, &queries, 1) == KVANT_OK;
}

static bool note_queries(const kvp_gpu_cells *cells)
{
    kvp_gpu_learner_input *lesson = &cells->learner->lesson;
    const size_t width = kvp_gpu_width(cells) * sizeof(float),
                 row = lesson->n_batches > 0 ? lesson->row : width;
    float *rows = malloc(KVP_KEPT_TOKENS * row);
    bool ok = rows != NULL;

    if (ok && lesson->n_batches == 0) {
        assume_queries(cells, rows, lesson->query_positions);
        ok = note_batch(cells, rows, row, lesson->query_positions);
    }
    for (uint32_t i = 0; i < lesson->n_batches && ok; i++)
        ok = copy_out(cells, rows, lesson->queries[i], KVP_KEPT_TOKENS * row / sizeof(*rows),
                      false) &&
             note_batch(cells, rows, row, lesson->query_positions + i * KVP_KEPT_TOKENS);
    free(rows);
    return ok;
}

/* Writes n of the lesson's rows, from the first-th on, to the tensor. Refused rows do not stop the
 * learning; kernels report them when they are stored. */
static void learn_rows(const kvp_gpu_cells *cells, size_t first, size_t n)
{
    const kvp_gpu_learner *l = cells->learner;
    const size_t width = kvp_gpu_width(cells);
    const int32_t *positions = l->lesson.positions != NULL ? l->lesson.positions + first : NULL;
    int64_t slots[KVANT_LEARN_BATCH_ROWS], at = KVANT_PAGE_TOKENS;

    for (size_t i = 0; i < n; i++)
        slots[i] = positions != NULL && positions[i] >= 0 &&
                           positions[i] < (int32_t)cells->cache->sink_tokens
                       ? (int64_t)(i % KVANT_PAGE_TOKENS)
                       : at++;
    if (positions != NULL)
        kvant_tensor_next_positions(l->tensor, positions, n);
    kvant_tensor_learn(l->tensor, slots, n, l->lesson.rows + first * width, width, 1);
}

/* Makes room for a layer's learned transform; false without memory. */
static bool have_learned(const kvp_gpu_cells *cells, kvp_gpu_learned_transform *learned)
{
    *learned =
        (kvp_gpu_learned_transform){ calloc(cells->n_kv_heads, sizeof(*learned->codecs)), NULL,
                                     calloc(1,
                                            kvant_tensor_transform_size(cells->learner->tensor)) };
    if (learned->codecs != NULL && cells->learner->has_block_centers)
        learned->start = calloc(kvp_gpu_width(cells), sizeof(*learned->start));
    return learned->codecs != NULL &&
           (learned->start != NULL || !cells->learner->has_block_centers);
}

static bool read_learned(const kvp_gpu_cells *cells, uint32_t head,
                         const kvp_gpu_learned_transform *learned)
{
    const kvant_tensor *tensor = cells->learner->tensor;
    kvant_block_info info = { .size = sizeof(info) };
    const size_t d = cells->head_dim;

    if (kvant_tensor_get_block(tensor, 1, head, &info) != KVANT_OK ||
        (info.start == NULL && learned->start != NULL))
        return false;
    if (learned->start != NULL)
        memcpy(learned->start + head * d, info.start, d * sizeof(*info.start));
    return kvant_tensor_make_codec(tensor, 1, head, cells->sources[head], &learned->codecs[head]) ==
           KVANT_OK;
}

/* Makes codecs of the newest transform, or none if the tensor learned none from the rows. */
static bool make_codecs(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;
    kvant_block_info info = { .size = sizeof(info) };
    size_t used;
    bool ok;

    if (kvant_tensor_get_block(l->tensor, 1, 0, &info) != KVANT_OK || info.affine.center == NULL)
        return true;
    ok = have_learned(cells, &l->made);
    for (uint32_t head = 0; head < cells->n_kv_heads && ok; head++)
        ok = read_learned(cells, head, &l->made);
    if (ok && l->made.kept != NULL)
        kvant_tensor_get_transform(l->tensor, 1, l->made.kept, &used);
    return ok;
}

/* A thread */

static bool fetch_rows(const kvp_gpu_cells *cells)
{
    kvp_gpu_learner_input *lesson = &cells->learner->lesson;
    const size_t n = (lesson->places != NULL ? lesson->n_all : lesson->n) * kvp_gpu_width(cells);

    if (lesson->rows != NULL)
        return true;
    lesson->rows = malloc(n * sizeof(*lesson->rows));
    return lesson->rows != NULL && copy_out(cells, lesson->rows, lesson->halves, n, true);
}

/* Moves the rows that are learned from to the front. */
static void gather_rows(const kvp_gpu_cells *cells)
{
    const kvp_gpu_learner_input *lesson = &cells->learner->lesson;
    const size_t width = kvp_gpu_width(cells);

    for (size_t i = 0; i < lesson->n && lesson->places != NULL; i++)
        memmove(lesson->rows + i * width, lesson->rows + lesson->places[i] * width,
                width * sizeof(*lesson->rows));
}

/* Does all that takes long when a matrix comes in force, because nobody waits here. It brings
 * the numbers to the GPU, and makes the kernels' side of the codec. Afterwards the first kv
 * head's codec stands for all. Rows that are sealed already need the former numbers until then.
 * After an error first_matrix.c tries again. */
static void bring_made(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    if (l->made.codecs == NULL || cells->center != NULL || cells->scale != NULL ||
        !kvp_gpu_enter(cells->gpu))
        return;
    if (cells->codecs[1] == NULL &&
        (kvant_cuda_codec_from(l->made.codecs[0], &l->sealed, NULL, 0) != KVANT_OK ||
         kvant_cuda_codec_create_open(l->sealed, &l->open) != KVANT_OK))
        return;
    l->brought = kvp_gpu_upload_transform(cells, (const kvant_codec *const *)l->made.codecs,
                                          l->made.kept, l->made.start, cells->gpu->copying);
    for (uint32_t head = 1; head < cells->n_kv_heads && l->brought; head++)
        kvant_codec_free(&l->made.codecs[head]);
}

static bool make_first(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;
    const size_t n = l->lesson.n, parts = (n + KVANT_LEARN_BATCH_ROWS - 1) / KVANT_LEARN_BATCH_ROWS;

    if (atomic_load(&l->dropped))
        return true;
    if (!create_tensor(l, cells) || !fetch_rows(cells) || !note_queries(cells))
        return false;
    gather_rows(cells);
    for (size_t i = 0; i < parts; i++)
        learn_rows(cells, i * n / parts, (i + 1) * n / parts - i * n / parts);
    kvp_gpu_lesson_free(&l->lesson);
    if (!make_codecs(cells))
        return false;
    bring_made(cells);
    return true;
}

static void *learn(void *context)
{
    kvp_gpu_cells *cells = context;
    queue *of = cells->learner->lesson.hurries ? &hurried : &at_once;

    wait_in(of, cells->learner->ticket);
    cells->learner->failed = !make_first(cells);
    add(&of->n_over, 1);
    return NULL;
}

static bool start_maker(kvp_gpu_cells *cells, const kvant_lesson_bucket *bucket, bool hurries);

/* Goes on with a further bucket. Both transforms fill `starts`, so the first one must be there. */
static void go_on(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;
    const kvant_lesson_bucket bucket = kvant_lesson_bucket_at(l->lesson.ahead);

    if (bucket.id == 0 || !l->brought || l->failed || atomic_load(&l->dropped))
        return;
    set_ahead(l, true);
    if (!start_maker(cells, &bucket, l->lesson.hurries))
        set_ahead(l, false);
}

static void *learn_apart(void *context)
{
    kvp_gpu_cells *cells = context;
    const bool hurries = cells->learner->lesson.hurries;

    if (!hurries)
        kvp_host_lower_priority();
    learn(context);
    go_on(cells);
    if (hurries)
        add(&n_firsts, -1);
    return NULL;
}

static bool have_event(kvp_gpu_learner *l)
{
    return l->ready != NULL ||
           kvp_cu_ok(kvp_cu.event_new(&l->ready, CU_NO_TIMING | CU_EVENT_SLEEPS),
                     "creating an event");
}

bool kvp_gpu_learner_start(kvp_gpu_cells *cells, const kvp_gpu_learner_input *lesson)
{
    kvp_gpu_learner *l = cells->learner;

    l->lesson = *lesson;
    if (!kvp_gpu_ensure_copy_stream(cells->gpu) || !have_event(l) ||
        !kvp_cu_ok(kvp_cu.event_record(l->ready, cells->gpu->stream), "copying")) {
        kvp_gpu_lesson_free(&l->lesson);
        return false;
    }
    l->begun = true;
    kvp_gpu_queries_find(cells, &l->lesson);
    if (l->lesson.hurries)
        add(&n_firsts, 1);
    l->ticket = take_ticket(l->lesson.hurries ? &hurried : &at_once);
    l->runs = kvant_os_start_thread(&l->thread, learn_apart, cells, STACK);
    if (!l->runs)
        learn(cells);
    if (!l->runs && l->lesson.hurries)
        add(&n_firsts, -1);
    return true;
}

/* Later position buckets */

/* Finds the centres of a bucket. Layers without centres per block have none. */
static bool find_centers(const kvp_gpu_learner *l, float *start, float *mean)
{
    return start == NULL ||
           (kvant_tensor_bucket_center(l->tensor, 0, KVANT_PAGE_TOKENS - 1, start) == KVANT_OK &&
            kvant_tensor_bucket_center(l->tensor, l->bucket.first, l->bucket.last, mean) ==
                KVANT_OK);
}

static void *make_bucket(void *context)
{
    kvp_gpu_cells *cells = context;
    kvp_gpu_learner *l = cells->learner;
    float *mean = calloc(kvp_gpu_width(cells), sizeof(*mean));
    kvp_gpu_learned_transform learned;
    const bool room = have_learned(cells, &learned) && mean != NULL;
    queue *of = l->making_hurries ? &hurried : &at_once;

    if (!l->making_hurries)
        kvp_host_lower_priority();
    wait_for_firsts(l);
    wait_in(of, take_ticket(of));
    l->made_bucket = room && kvp_gpu_enter(cells->gpu) && find_centers(l, learned.start, mean) &&
                     kvant_tensor_make_bucket_codecs(l->tensor, l->bucket.first, l->bucket.last,
                                                     KVANT_PAGE_TOKENS, cells->sources,
                                                     learned.codecs, learned.kept, 1) == KVANT_OK &&
                     kvp_gpu_upload_bucket(cells, l->bucket.id, &learned, mean);
    add(&of->n_over, 1);
    l->bucket_kept = learned.kept;
    kvp_gpu_free_codecs(learned.codecs, cells->n_kv_heads);
    free(learned.start);
    free(mean);
    return NULL;
}

static bool start_maker(kvp_gpu_cells *cells, const kvant_lesson_bucket *bucket, bool hurries)
{
    kvp_gpu_learner *l = cells->learner;

    l->bucket = *bucket;
    l->made_bucket = false;
    l->making_hurries = hurries;
    l->making = l->maker_runs = kvant_os_start_thread(&l->maker, make_bucket, cells, STACK);
    return l->making;
}

/* Forgets a transform that was made ahead of time and is not the one that is needed. */
static void forget_ahead(kvp_gpu_learner *l)
{
    finish_maker(l);
    l->making = false;
    free(l->bucket_kept);
    l->bucket_kept = NULL;
}

bool kvp_gpu_learner_request(kvp_gpu_cells *cells, const kvant_lesson_bucket *bucket, bool hurries)
{
    kvp_gpu_learner *l = cells->learner;

    if (l == NULL || l->tensor == NULL || cells->cache->buckets.centers.uneven ||
        cells->cache->buckets.centers.rope.size == 0)
        return false;
    if (l->making && l->ahead && l->bucket.id != bucket->id)
        forget_ahead(l);
    set_ahead(l, false);
    if (l->making)
        return l->bucket.id == bucket->id;
    return start_maker(cells, bucket, hurries);
}

bool kvp_gpu_learner_answer(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    if (l == NULL || !l->making)
        return true;
    finish_maker(l);
    l->making = false;
    cells->further_made |= (uint32_t)l->made_bucket << l->bucket.id;
    if (l->made_bucket)
        kvp_gpu_keep(cells, l->bucket.id, l->bucket_kept);
    else
        free(l->bucket_kept);
    l->bucket_kept = NULL;
    return l->made_bucket;
}
