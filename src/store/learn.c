/* learn.c - see learn.h. It owns no memory but a table of signs during a call. */
#include "learn.h"

#include <stdlib.h>

#include "../base/alloc.h"

/* Which rows */

/* The squared lengths of rows, sorted, have a median gap. In ordinary text it is more than this
 * part of the median length; in a text that repeats a few tokens it is less. */
#define FEWEST_GAP 5e-4
/* Rows of 1024 that differ, at least. Prose has twice as many. Code and tables have 225 and
 * more. */
#define LEAST_DIFFERENT 192u
/* Two values are alike if at most one sign of this many differs, so that the angle between them is
 * below 22 degrees. Half of the signs of unrelated values differ. In the first layer, equal tokens
 * have equal signs. In later layers signs also depend on the tokens before: of a word that repeats,
 * none of 128 differs, and of a repeated phrase a few do. With a larger part, values of text in a
 * layer where they have a common direction would look alike. */
#define SIGNS_PER_DIFFERENCE 8u

static int compare_lengths(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

bool kvant_learn_lengths_are_alike(double *lengths, uint32_t n)
{
    if (n < KVANT_LEARN_SAMPLES)
        return false;
    qsort(lengths, n, sizeof *lengths, compare_lengths);
    const double middle = lengths[n / 2];
    for (uint32_t i = 0; i + 1 < n; i++)
        lengths[i] = lengths[i + 1] - lengths[i];
    qsort(lengths, n - 1, sizeof *lengths, compare_lengths);
    return lengths[n / 2] < FEWEST_GAP * middle;
}

/* Rows of values: floats, or halves if there are no floats. */
typedef struct value_rows {
    const float *floats;
    const uint16_t *halves;
    size_t stride, n, width;
} value_rows;

typedef struct signs {
    uint64_t words[KVANT_LEARN_SIGNS / 64];
} signs;

#define NEGATIVE_ZERO 0x8000u /* a half; the bits of negative numbers are larger */

static signs signs_of(const value_rows *rows, size_t i)
{
    signs s = { { 0 } };
    for (size_t j = 0, at = i * rows->stride; j < rows->width; j++, at++) {
        const uint64_t negative =
            rows->floats ? rows->floats[at] < 0 : rows->halves[at] > NEGATIVE_ZERO;
        s.words[j / 64] |= negative << j % 64;
    }
    return s;
}

/* Adds up bits in parallel: of pairs, of four, of bytes, then of all bytes. */
static uint32_t count_bits(uint64_t x)
{
    x -= x >> 1 & 0x5555555555555555;
    x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
    x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0f;
    return (uint32_t)(x * 0x0101010101010101 >> 56);
}

static bool is_among(const signs *seen, size_t n, const signs *s, uint32_t most)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t different = 0;
        for (size_t w = 0; w < KVANT_LEARN_SIGNS / 64; w++)
            different += count_bits(seen[i].words[w] ^ s->words[w]);
        if (different <= most)
            return true;
    }
    return false;
}

/* Stops as soon as enough rows differ. That is after a third of a text's rows. */
static bool are_alike(value_rows rows)
{
    const size_t least = (rows.n * LEAST_DIFFERENT + 1023) / 1024;
    signs *seen = kvant_alloc(least + 1, sizeof *seen);
    size_t n_seen = 0;
    if (!seen)
        return false;
    rows.width = rows.width < KVANT_LEARN_SIGNS ? rows.width : KVANT_LEARN_SIGNS;
    for (size_t i = 0; i < rows.n && n_seen < least; i++) {
        seen[n_seen] = signs_of(&rows, i);
        n_seen +=
            !is_among(seen, n_seen, &seen[n_seen], (uint32_t)rows.width / SIGNS_PER_DIFFERENCE);
    }
    kvant_free(seen);
    return n_seen < least;
}

bool kvant_learn_values_are_alike(const float *values, size_t stride, size_t n, size_t width)
{
    return are_alike((value_rows){ .floats = values, .stride = stride, .n = n, .width = width });
}

bool kvant_learn_halves_are_alike(const uint16_t *values, size_t stride, size_t n, size_t width)
{
    return are_alike((value_rows){ .halves = values, .stride = stride, .n = n, .width = width });
}

void kvant_learn_assume_queries(float *x, size_t n)
{
    uint32_t random = 1;
    for (size_t i = 0; i < n; i++) {
        random = 1664525 * random + 1013904223;
        x[i] = random >> 31 ? -1.0f : 1.0f;
    }
}

/* Errors */

/* With a smaller limit, ordinary text uses up the transforms of a tensor, and queries are
 * transformed for each of them. With a larger one, text of another kind is stored with a larger
 * error. */
#define MOST_ERROR 1.5
/* Statistics alone do not know W, which is worth more than factors per channel. So the limit for
 * transforms with W is this many times higher when the sample cannot decide. */
#define MATRIX_ERROR 2
/* The limit below position NEAR_POSITIONS, if RoPE is known. There a transform from another text
 * errs 0.8 to 1.1 times as much. */
#define NEAR_POSITIONS 512
#define NEAR_ERROR 1.25
/* The limit from that position on. A transform that was rotated there is not as good for a few rows
 * as a transform made from these rows. */
#define FAR_ERROR 2.0

double kvant_learn_most_error(const kvant_learn_estimate *estimate)
{
    if (!estimate->sampled)
        return estimate->unsampled_matrix ? MATRIX_ERROR * MOST_ERROR : MOST_ERROR;
    if (!estimate->knows_rope)
        return MOST_ERROR;
    return estimate->position < NEAR_POSITIONS ? NEAR_ERROR : FAR_ERROR;
}

/* Matrices of a cache that judges */

/* The first matrix is made from the rows that there are. Each later one needs four times as many
 * rows, but at least SECOND_ROWS. On SmolLM2 twice the rows lower the error by less than 5 %, and a
 * matrix takes a millisecond per kv head. The last matrix is made from MOST_ROWS, or it was not
 * worth it, or it leaves one transform unused. */
#define SECOND_ROWS 256u
#define MOST_ROWS 960u /* of 2048 tokens without sinks, this many rows are accumulated */

void kvant_learn_begin(kvant_learn_schedule *schedule, bool has_matrix)
{
    *schedule = (kvant_learn_schedule){ .n_buckets = schedule->n_buckets,
                                        .most = schedule->most,
                                        .due = has_matrix ? SECOND_ROWS : 0 };
}

bool kvant_learn_was_tried(const kvant_learn_schedule *schedule, int bucket)
{
    return !schedule->n_buckets || bucket < 0 || schedule->spans[bucket].end;
}

uint32_t kvant_learn_spans_made(const kvant_learn_schedule *schedule)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < schedule->n_buckets; i++)
        n += schedule->spans[i].end && schedule->spans[i].first == i;
    return n;
}

uint32_t kvant_learn_buckets_left(const kvant_learn_schedule *schedule)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < schedule->n_buckets; i++)
        n += !schedule->spans[i].end;
    return n;
}

kvant_bucket_span kvant_learn_next_span(const kvant_learn_schedule *schedule, int bucket,
                                        uint32_t n_unused)
{
    const uint32_t first = bucket < 0 ? 0 : (uint32_t)bucket,
                   made = kvant_learn_spans_made(schedule);
    uint32_t end = first, most = n_unused > 2 ? n_unused - 1 : 1;
    if (schedule->n_buckets == 0 || schedule->spans[first].end)
        return schedule->spans[first];
    if (schedule->most == 1)
        return (kvant_bucket_span){ 0, (uint8_t)schedule->n_buckets };
    while (end < schedule->n_buckets && !schedule->spans[end].end)
        end++;
    if (schedule->most && most + made > schedule->most)
        most = schedule->most > made ? schedule->most - made : 1;
    return (kvant_bucket_span){ (uint8_t)first,
                                (uint8_t)(first + (end - first + most - 1) / most) };
}

void kvant_learn_made_span(kvant_learn_schedule *schedule, kvant_bucket_span span, bool better)
{
    if (!better)
        span = (kvant_bucket_span){ span.first, (uint8_t)(span.first + 1) };
    for (uint32_t i = span.first; i < span.end && i < schedule->n_buckets; i++)
        schedule->spans[i] = span;
}

bool kvant_learn_takes_rows(const kvant_learn_schedule *schedule, int bucket)
{
    return !schedule->done || !kvant_learn_was_tried(schedule, bucket);
}

bool kvant_learn_is_due(const kvant_learn_schedule *schedule, int bucket, size_t n)
{
    return n >= schedule->due || !kvant_learn_was_tried(schedule, bucket);
}

bool kvant_learn_wants_queries(const kvant_learn_schedule *schedule, bool single, size_t n)
{
    const bool is_prompt = n >= KVANT_LEARN_QUERY_TOKENS;
    return single ? !schedule->done || is_prompt : !schedule->done && is_prompt;
}

bool kvant_learn_makes_matrix(kvant_learn_schedule *schedule, int bucket, uint32_t n, bool plain,
                              uint32_t n_unused)
{
    const uint32_t later =
        kvant_learn_was_tried(schedule, bucket) ? kvant_learn_buckets_left(schedule) : 0;
    schedule->due = 4 * n < SECOND_ROWS ? SECOND_ROWS : 4 * n < MOST_ROWS ? 4 * n : MOST_ROWS;
    schedule->done = n >= MOST_ROWS || n_unused < 2;
    return n_unused >= (plain ? 1 : 2 + later);
}

bool kvant_learn_has_ended(const kvant_learn_schedule *schedule)
{
    return schedule->done && !kvant_learn_buckets_left(schedule) &&
           !(schedule->n_buckets && schedule->most);
}

/* Position buckets of a cache with lessons */

static const int32_t begins[KVANT_LESSON_BUCKETS + 1] = {
    0, KVANT_LESSON_FIRST_BUCKET, 8192, 16384, 32768, 65536, 131072, 262144
};

kvant_lesson_bucket kvant_lesson_bucket_at(uint32_t id)
{
    return (kvant_lesson_bucket){ .id = id,
                                  .first = begins[id],
                                  .last = begins[id + 1] - 1,
                                  .from = id > 0 ? begins[id] + KVANT_LESSON_LATE : 0 };
}

void kvant_lesson_buckets_begin(kvant_lesson_buckets *buckets)
{
    *buckets = (kvant_lesson_buckets){ .made = 1, .since = buckets->since, .position = -1 };
}

/* The bucket whose transform a row gets if all transforms are made. */
static uint32_t bucket_of(int32_t position)
{
    uint32_t id = 0;
    while (id + 1 < KVANT_LESSON_BUCKETS && position >= begins[id + 1] + KVANT_LESSON_LATE)
        id++;
    return id;
}

uint32_t kvant_lesson_bucket_of(const kvant_lesson_buckets *buckets, int32_t position)
{
    uint32_t id = bucket_of(position);
    while (!(buckets->made >> id & 1))
        id--;
    return id;
}

bool kvant_lesson_in_first_bucket(const kvant_lesson_buckets *buckets)
{
    return bucket_of(buckets->position) == 0;
}

uint32_t kvant_lesson_bucket_after(int32_t last)
{
    return last >= 0 ? bucket_of(last + KVANT_LESSON_LATE) : 0;
}

uint32_t kvant_lesson_next_bucket(const kvant_lesson_buckets *buckets)
{
    uint32_t next = 0;
    while (buckets->made >> next & 1)
        next++;
    return next;
}

bool kvant_lesson_may_request(const kvant_lesson_buckets *buckets, uint32_t id)
{
    return buckets->requested == 0 && !buckets->ended && !(buckets->made >> id & 1);
}

void kvant_lesson_requested(kvant_lesson_buckets *buckets, uint32_t id, bool any)
{
    buckets->requested = any ? id : 0;
    buckets->ended = !any;
    buckets->since = 0;
}

void kvant_lesson_answered(kvant_lesson_buckets *buckets, bool all)
{
    if (all)
        buckets->made |= 1u << buckets->requested;
    buckets->ended = !(buckets->made >> buckets->requested & 1);
    buckets->requested = 0;
}

bool kvant_lesson_takes_answer(const kvant_lesson_buckets *buckets, int32_t last)
{
    return buckets->requested > 0 && buckets->since >= KVANT_LESSON_LATE &&
           bucket_of(last) >= buckets->requested;
}

/* The first lesson, from exact pages */

/* A lesson has at least 24 steps of few tokens before its transforms come in force. With an 8B
 * shape on an H200, 16 CPU threads needed 0.12 s to learn, and a prompt and 24 tokens take 0.15 s.
 * A GPU needs less; fewer steps were not measured. */
#define LEAST_STEPS 24u

/* A lesson begins when two thirds of the pages have blocks. It is over before all pages have.
 * Tokens that come one by one put its transforms in force when all pages have blocks. The token
 * that needs another page has to seal rows, and a token that had to do both would take longer than
 * three others. */
kvant_lesson_action kvant_lesson_next(kvant_lesson *lesson, const kvant_lesson_step *step)
{
    const bool is_long = step->n >= KVANT_LEARN_QUERY_TOKENS;
    if (step->stays_exact && lesson->begun && is_long && step->seals && step->opens_empty)
        return KVANT_LESSON_JOIN_LATE;
    if (!step->stays_exact || step->seals)
        return step->brings_more ? KVANT_LESSON_NONE : KVANT_LESSON_SETTLE;
    if (lesson->begun)
        return !is_long && ++lesson->n_short_steps >= LEAST_STEPS && step->n_used == step->n_pages
                   ? KVANT_LESSON_JOIN
                   : KVANT_LESSON_NONE;
    if (lesson->tried || step->n_used * 3 < step->n_pages * 2)
        return KVANT_LESSON_NONE;
    return is_long ? KVANT_LESSON_TEACH : KVANT_LESSON_BEGIN;
}

/* The first lesson, from f16 in place */

#define ALONE_STEPS 256u /* steps of few tokens, after which a lesson is over */

/* In a small room learning begins when half is full, because a prompt's next batch may fill the
 * room. In a large room it begins when a third is full, because shorter conversations never need a
 * transform. */
bool kvant_lesson_in_place_begins(size_t room, size_t n)
{
    const size_t half = room / 2,
                 enough = KVANT_LEARN_LESSON_ROWS < half ? KVANT_LEARN_LESSON_ROWS : half;
    return n >= (room / 3 > enough ? room / 3 : enough);
}

bool kvant_lesson_in_place_looks(const kvant_lesson_in_place *lesson, size_t n)
{
    return lesson->n_ready == 0 && n >= 2 * lesson->n_alike;
}

/* Rows between two of these stages, in which transforms are learned. 1024 tokens take seconds when
 * they are generated one by one. A GPU reads the batches of a prompt much faster, so then there are
 * 2048 rows. If the room ends before that, the cache waits. */
static size_t rows_between(const kvant_lesson_in_place *lesson, size_t room, bool short_step)
{
    const size_t quarter = (room - lesson->begun) / 4;
    if (!short_step)
        return 2 * KVANT_LEARN_LESSON_ROWS;
    return quarter < KVANT_LEARN_LESSON_ROWS ? quarter : KVANT_LEARN_LESSON_ROWS;
}

/* A prompt may be over before its transforms are learned. On an H200 with 16 cores, where CPU
 * threads learned, they took 0.35 s. The 2400 tokens of a prompt took 0.2 s. So the tokens after a
 * prompt do not wait at once. They wait after as many steps as take longer than learning, or when
 * the room ends. */
bool kvant_lesson_in_place_is_due(kvant_lesson_in_place *lesson, size_t room, size_t n,
                                  size_t n_tensors, bool short_step)
{
    if (lesson->begun == 0)
        lesson->begun = n;
    lesson->n_short_steps += short_step;
    if (lesson->n_ready > 0)
        return true;
    if (n < lesson->begun + rows_between(lesson, room, short_step))
        return false;
    return !short_step || lesson->n_short_steps >= ALONE_STEPS || n + 2 * n_tensors >= room;
}

bool kvant_lesson_in_place_goes_on(const kvant_lesson_in_place *lesson, size_t room, size_t n,
                                   bool short_step)
{
    return lesson->requested_at == 0 ||
           n >= lesson->requested_at + rows_between(lesson, room, short_step);
}
