/* learn.h - decides when a cache learns its transforms, from which rows, and when they come in
 * force. It knows neither devices nor threads, and makes no transform: its callers do. Decisions
 * depend on counts, positions, values of rows and measured errors, never on a clock.
 *
 * Two kinds of caches learn. A cache that *judges* looks at rows before it stores them: a tensor in
 * the computer's memory, and libkvant's cache on a GPU. A cache with *lessons* cannot look, because
 * its steps are captured graphs: the llama.cpp plug-in's cache on a GPU. It learns a first
 * transform from one lesson, and further ones for later positions from the same rows. Learning
 * takes time, so a transform comes in force some rows or steps after its lesson. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Which rows */

/* How many rows a transform is made from, at least. Their mean removes nearly all of the constant
 * part of keys. A batch with at least this many rows is judged without earlier rows, because those
 * may be of another kind. */
#define KVANT_LEARN_ROWS 64u
/* Rows of a lesson. More rows are not looked at, because learning from them would take longer. */
#define KVANT_LEARN_LESSON_ROWS 1024u
/* Rows that are judged, or from which a centre and a scale are learned, at a time. */
#define KVANT_LEARN_BATCH_ROWS 512u
/* With fewer sampled rows or queries there is no estimate of an error. */
#define KVANT_LEARN_SAMPLES 16u
/* A step with at least this many tokens is a prompt's. Its queries are looked at, also while keys
 * of another kind may still come. */
#define KVANT_LEARN_QUERY_TOKENS 64u

/* Whether tokens are too much alike to learn a transform for all later rows from. `lengths`: the
 * squared lengths of n rows; RoPE rotates a token's key but keeps its length. The call changes
 * them. `values`: rows of one layer as floats or as halves, which RoPE does not rotate. Any layer
 * will do. False without memory. */
bool kvant_learn_lengths_are_alike(double *lengths, uint32_t n);
bool kvant_learn_values_are_alike(const float *values, size_t stride, size_t n, size_t width);
bool kvant_learn_halves_are_alike(const uint16_t *values, size_t stride, size_t n, size_t width);

/* How many channels of a value these calls look at. Their signs tell tokens apart. */
#define KVANT_LEARN_SIGNS 128u

/* Fills x with random signs. They serve as queries where none came, as if all directions of queries
 * counted alike. */
void kvant_learn_assume_queries(float *x, size_t n);

/* Errors of a cache that judges */

/* A matrix gets a transform if it multiplies the squared error of the rows at hand by at most this
 * factor. A smaller gain is not worth the memory, nor one more transform of each query. */
#define KVANT_LEARN_WORTH 0.95

/* How an error was estimated. */
typedef struct kvant_learn_estimate {
    bool sampled;          /* from rows and queries; false: from statistics of rows alone */
    bool unsampled_matrix; /* the newest transform has W, and the device keeps rows to itself */
    bool knows_rope;       /* rows have positions */
    int32_t position;      /* of the rows, or below 0 */
} kvant_learn_estimate;

/* A limit. If an old transform multiplies the squared error of a new transform by more than this,
 * rows get the new one, and their blocks are encoded again. */
double kvant_learn_most_error(const kvant_learn_estimate *estimate);

/* Matrices of a cache that judges */

/* Position buckets. The first is [0, 1024), the second begins at 1024, and each further bucket is
 * twice as long as the bucket before it. A run of buckets (`kvant_bucket_span`) can share a
 * transform. Each bucket of a run counts as much as each other bucket, however long it is. */
#define KVANT_FIRST_BUCKET 1024u
#define KVANT_MOST_BUCKETS 22u /* buckets of 2^31 positions */

typedef struct kvant_bucket_span {
    uint8_t first, end; /* buckets first to end - 1; end 0: none */
} kvant_bucket_span;

/* Transforms that were made from the second moments of rows of one kind, and when the next one is
 * due. In the calls below, `bucket` is the bucket that rows have reached; below 0: it is not known.
 * `n_unused`: transforms that may still be made. */
typedef struct kvant_learn_schedule {
    uint32_t n_buckets; /* 0: RoPE is not known */
    uint32_t most;      /* transforms for positions, at most; 0: as many as there are buckets */
    uint32_t due;       /* how many keys the next matrix needs */
    bool done;          /* enough rows were seen */
    /* By bucket: the run of buckets whose transform was made from these moments. */
    kvant_bucket_span spans[KVANT_MOST_BUCKETS];
} kvant_learn_schedule;

/* Rows of another kind begin new second moments; has_matrix: their transform has one already. */
void kvant_learn_begin(kvant_learn_schedule *schedule, bool has_matrix);

/* Whether a transform was tried for the bucket, or none can be tried. */
bool kvant_learn_was_tried(const kvant_learn_schedule *schedule, int bucket);

/* How many runs of buckets have a transform, or how many buckets have none. */
uint32_t kvant_learn_spans_made(const kvant_learn_schedule *schedule);
uint32_t kvant_learn_buckets_left(const kvant_learn_schedule *schedule);

/* The run of buckets for the next transform. Buckets without a transform are shared among as many
 * transforms as can still be made, except one, which is kept for rows of another kind. */
kvant_bucket_span kvant_learn_next_span(const kvant_learn_schedule *schedule, int bucket,
                                        uint32_t n_unused);

/* The run got a transform. If none was better, the first bucket is not tried again. */
void kvant_learn_made_span(kvant_learn_schedule *schedule, kvant_bucket_span span, bool better);

/* Whether rows are added to the second moments, and whether a matrix is due with n keys. */
bool kvant_learn_takes_rows(const kvant_learn_schedule *schedule, int bucket);
bool kvant_learn_is_due(const kvant_learn_schedule *schedule, int bucket, size_t n);

/* Whether queries of a step with n tokens are of use. single: so are queries of single tokens. */
bool kvant_learn_wants_queries(const kvant_learn_schedule *schedule, bool single, size_t n);

/* A matrix is due with n keys: sets when the next one is. Returns whether to make it. One unused
 * transform is kept for rows of another kind, unless the rows' transform has no matrix yet
 * (`plain`); one more is kept for each bucket without a transform. */
bool kvant_learn_makes_matrix(kvant_learn_schedule *schedule, int bucket, uint32_t n, bool plain,
                              uint32_t n_unused);

/* Whether no further matrix will be made from these second moments, unless a caller asks for
 * matrices of a range of positions (`most`). */
bool kvant_learn_has_ended(const kvant_learn_schedule *schedule);

/* Position buckets of a cache with lessons */

/* The transforms of position buckets, the last one without an end. The first bucket ends at 2048:
 * queries of shorter contexts pass through one transform only. Every further bucket costs memory
 * and another transform of the queries. Below 8192 a bucket spans more than a doubling. */
#define KVANT_LESSON_BUCKETS 7u
#define KVANT_LESSON_FIRST_BUCKET 2048u
/* Rows of a position bucket that are stored before its transform is in force. The number comes from
 * caches that learned on CPU threads, which needed this time. With more, more rows have the
 * transform of the bucket before. */
#define KVANT_LESSON_LATE 1024

/* A position bucket. Rows use its transform from position `from` on. */
typedef struct kvant_lesson_bucket {
    uint32_t id;
    int32_t first, last, from;
} kvant_lesson_bucket;

/* Which buckets have transforms. */
typedef struct kvant_lesson_buckets {
    uint32_t made;      /* a bit for each bucket that has a transform; bit 0 is always set */
    uint32_t requested; /* the bucket whose transform was asked for; 0: none */
    size_t since;       /* rows that were stored since then */
    bool ended;         /* no further transform can be learned */
    int32_t position;   /* the last position of the last step */
} kvant_lesson_buckets;

kvant_lesson_bucket kvant_lesson_bucket_at(uint32_t id);
void kvant_lesson_buckets_begin(kvant_lesson_buckets *buckets);

/* The bucket whose transform a row gets: of its position, or the last one before it that has
 * one. */
uint32_t kvant_lesson_bucket_of(const kvant_lesson_buckets *buckets, int32_t position);

/* Whether rows of the last step are in the first bucket. */
bool kvant_lesson_in_first_bucket(const kvant_lesson_buckets *buckets);

/* The bucket whose transform is due after rows up to this position, and the first bucket that has
 * no transform. `is_due`: the latter is due. */
uint32_t kvant_lesson_bucket_after(int32_t last);
uint32_t kvant_lesson_next_bucket(const kvant_lesson_buckets *buckets);

/* may_request: whether the transform of a bucket may be asked for. requested: it was, and some
 * layer has rows to learn from (`any`). answered: it is there, in all layers or not. */
bool kvant_lesson_may_request(const kvant_lesson_buckets *buckets, uint32_t id);
void kvant_lesson_requested(kvant_lesson_buckets *buckets, uint32_t id, bool any);
void kvant_lesson_answered(kvant_lesson_buckets *buckets, bool all);

/* Whether rows up to this position take the transform that was asked for. Enough rows came since,
 * so it has been learned, and results do not depend on time. */
bool kvant_lesson_takes_answer(const kvant_lesson_buckets *buckets, int32_t last);

/* The first lesson, from exact pages */

typedef struct kvant_lesson {
    bool begun;             /* it is being learned from */
    bool tried;             /* it was tried since a page was given up last */
    uint32_t n_short_steps; /* steps of few tokens since it began */
} kvant_lesson;

/* A step, after the plan decided for it. */
typedef struct kvant_lesson_step {
    size_t n;                /* tokens */
    bool stays_exact;        /* all of its rows go to exact pages only */
    bool seals, opens_empty; /* it seals blocks; no block that it opens has rows */
    bool brings_more;        /* it has more rows than the exact pages, and is encoded at once */
    /* Exact pages that have blocks: with this step's blocks for a prompt's step, or once the lesson
     * was tried; otherwise without. */
    uint32_t n_used;
    uint32_t n_pages;
} kvant_lesson_step;

typedef enum kvant_lesson_action {
    KVANT_LESSON_NONE,
    KVANT_LESSON_BEGIN,     /* the lesson begins now */
    KVANT_LESSON_TEACH,     /* the step's graph takes the lesson of each layer */
    KVANT_LESSON_JOIN,      /* transforms come in force */
    KVANT_LESSON_JOIN_LATE, /* the same layer by layer, while the step's graph is computed */
    KVANT_LESSON_SETTLE,    /* rows are sealed before: transforms come in force, after a lesson if
                             * none has begun */
} kvant_lesson_action;

kvant_lesson_action kvant_lesson_next(kvant_lesson *lesson, const kvant_lesson_step *step);

/* The first lesson, from f16 in place */

typedef struct kvant_lesson_in_place {
    size_t begun;         /* rows when the lesson began; 0: it did not begin */
    size_t n_short_steps; /* steps of few tokens since then */
    size_t n_ready;       /* tensors whose transforms are in force */
    /* rows when a further bucket's transform was asked for; 0: never */
    size_t requested_at;
    size_t n_alike; /* rows that were found too much alike; 0: none */
} kvant_lesson_in_place;

/* Whether n rows are looked at, of a lesson's rows. Rows that were too much alike are looked at
 * again when there are twice as many, because more text may follow them. When the transforms of
 * some tensors are in force, no further one is learned. */
bool kvant_lesson_in_place_looks(const kvant_lesson_in_place *lesson, size_t n);

/* Whether the lesson begins when n of `room` rows are there. */
bool kvant_lesson_in_place_begins(size_t room, size_t n);

/* Whether the transforms of some of n_tensors come in force when n of `room` rows are there. The
 * call counts steps, from the step on in which the lesson begins. */
bool kvant_lesson_in_place_is_due(kvant_lesson_in_place *lesson, size_t room, size_t n,
                                  size_t n_tensors, bool short_step);

/* Whether the transform of a further bucket is asked for, once all tensors are ready. */
bool kvant_lesson_in_place_goes_on(const kvant_lesson_in_place *lesson, size_t room, size_t n,
                                   bool short_step);
