/* test_plan_traces.c - the plan (src/store/plan.h) on recorded traces of llama.cpp's cells
 * (integrations/llama.cpp/trace.h describes the format). Every row is in one place and the budget
 * holds. First and newest tokens of a sequence stay exact while there is room, and two replays are
 * equal. */
#include "plan_model.h"

enum { FIRST = 64, NEWEST = 128, MOST_CELLS = BLOCKS * SLOTS, PIECE = 512 };

typedef struct line {
    char kind;
    uint32_t step, stream, n_kv, n_slots, n_positions, n_visible;
    int64_t slots[MOST_CELLS], positions[MOST_CELLS], visible[MOST_CELLS];
} line;

typedef struct trace {
    model m;
    uint32_t n_cells; /* cells of a stream */
    int32_t positions[MOST_CELLS];
    uint32_t n_checked; /* steps of one sequence that had enough pages */
} trace;

/* Files */

/* Expands runs: "5+3" means 5, 6, 7. "-2*3" means -2, -2, -2. */
static uint32_t read_runs(const char *text, int64_t *to)
{
    uint32_t n = 0;
    while (*text && strcmp(text, "-") != 0) {
        char *rest;
        const int64_t first = strtoll(text, &rest, 10);
        const bool rises = *rest == '+';
        assert_true(rises || *rest == '*');
        const uint32_t count = (uint32_t)strtoul(rest + 1, &rest, 10);
        assert_true(count <= MOST_CELLS - n);
        for (uint32_t i = 0; i < count; i++)
            to[n++] = first + (rises ? i : 0);
        text = rest + (*rest == ',');
    }
    return n;
}

/* False at the end of the file. */
static bool read_line(FILE *file, line *l)
{
    static char text[1 << 16], columns[3][1 << 14];
    unsigned cache;
    if (!fgets(text, sizeof text, file))
        return false;
    if (strcmp(text, "kvant-trace 1\n") == 0)
        return read_line(file, l);
    assert_int_equal(sscanf(text, "%c %u %u %u %u %16383s %16383s %16383s", &l->kind, &cache,
                            &l->step, &l->stream, &l->n_kv, columns[0], columns[1], columns[2]),
                     8);
    assert_int_equal(cache, 1);
    l->n_slots = read_runs(columns[0], l->slots);
    l->n_positions = read_runs(columns[1], l->positions);
    l->n_visible = read_runs(columns[2], l->visible);
    return true;
}

/* Steps */

/* A step of the plan. The blocks of a sequence are the blocks that its rows see. */
typedef struct step {
    int64_t slots[MOST_CELLS];
    int32_t positions[MOST_CELLS], blocks[MOST_CELLS];
    kvant_plan_view views[PIECE];
    uint32_t n, n_blocks, n_views;
} step;

static uint32_t first_block(const trace *t, const line *l)
{
    return l->stream * t->n_cells / SLOTS;
}

static void release_unused(trace *t, const line *l)
{
    for (uint32_t block = (l->n_kv + SLOTS - 1) / SLOTS; block < t->n_cells / SLOTS; block++)
        release(&t->m, (int32_t)(first_block(t, l) + block));
}

/* Adds the rows and views of a line; rows of a sequence have positions that count up. */
static void add_line(const trace *t, const line *l, step *s)
{
    const uint32_t at = s->n_blocks;
    assert_int_equal(l->n_positions, l->n_slots);
    for (uint32_t i = 0; i < l->n_visible; i++) {
        const int32_t block = (int32_t)(first_block(t, l) + (uint32_t)l->visible[i] / SLOTS);
        if (s->n_blocks == at || s->blocks[s->n_blocks - 1] != block)
            s->blocks[s->n_blocks++] = block;
    }
    for (uint32_t i = 0; i < l->n_slots; i++) {
        if (i == 0 || l->positions[i] != l->positions[i - 1] + 1)
            s->views[s->n_views++] =
                (kvant_plan_view){ s->blocks + at, s->n_blocks - at, (int32_t)l->positions[i] };
        s->slots[s->n] = first_block(t, l) * SLOTS + l->slots[i];
        s->positions[s->n++] = (int32_t)l->positions[i];
    }
}

static void note_positions(trace *t, const step *s)
{
    for (uint32_t i = 0; i < s->n; i++)
        t->positions[s->slots[i]] = s->positions[i];
}

/* Finds the blocks that are to be exact: the blocks of the step, of first tokens, and of newest
 * tokens that a step of one sequence sees. Returns whether there is room for all of them. */
static bool find_wanted(const trace *t, const step *s, const line *l, bool *wanted)
{
    uint32_t n = 0;
    memset(wanted, 0, BLOCKS * sizeof *wanted);
    for (uint32_t i = 0; i < s->n; i++)
        wanted[s->slots[i] / SLOTS] = true;
    for (uint32_t i = 0; i < l->n_visible; i++) {
        const int64_t cell = first_block(t, l) * SLOTS + l->visible[i];
        if (t->positions[cell] < FIRST || t->positions[cell] >= s->views[0].query - NEWEST)
            wanted[cell / SLOTS] = true;
    }
    for (uint32_t block = 0; block < BLOCKS; block++)
        n += wanted[block] ||
             (block < t->m.params.n_blocks && kvant_plan_holds_first(t->m.plan, block));
    return n <= t->m.params.n_pages;
}

/* In a step of one sequence, wanted blocks that were exact stay so, and blocks of the step are. */
static void check_wanted(trace *t, const step *s, const bool *wanted, const bool *was_exact)
{
    bool written[BLOCKS] = { false };
    for (uint32_t i = 0; i < s->n; i++)
        written[s->slots[i] / SLOTS] = true;
    for (uint32_t block = 0; block < t->m.params.n_blocks; block++)
        if (written[block] || (wanted[block] && was_exact[block]))
            assert_true(kvant_plan_page(t->m.plan, block) >= 0);
    t->n_checked++;
}

static void take_step(trace *t, step *s, const line *l)
{
    bool wanted[BLOCKS], was_exact[BLOCKS];
    for (uint32_t block = 0; block < t->m.params.n_blocks; block++)
        was_exact[block] = kvant_plan_page(t->m.plan, block) >= 0;
    note_positions(t, s);
    take(&t->m, &(kvant_plan_step){ s->slots, s->positions, s->n, s->views, s->n_views, false });
    if (s->n_views == 1 && find_wanted(t, s, l, wanted))
        check_wanted(t, s, wanted, was_exact);
    s->n = s->n_blocks = s->n_views = 0;
}

/* Restores rows without a step, in pieces of a sequence. Nobody tells the plan their positions. */
static void restore(trace *t, const line *l, step *s)
{
    for (uint32_t i = 0; i < l->n_slots; i++) {
        s->slots[s->n] = first_block(t, l) * SLOTS + l->slots[i];
        s->positions[s->n++] = (int32_t)i;
        if (s->n == PIECE || i + 1 == l->n_slots) {
            note_positions(t, s);
            take(&t->m, &(kvant_plan_step){ s->slots, s->positions, s->n, NULL, 0, false });
            s->n = 0;
        }
    }
}

static void shift(trace *t, const line *l)
{
    int32_t by[BLOCKS] = { 0 };
    for (uint32_t i = 0; i < l->n_slots; i++) {
        const int64_t cell = first_block(t, l) * SLOTS + l->slots[i];
        t->positions[cell] += (int32_t)l->positions[i];
        by[cell / SLOTS] = (int32_t)l->positions[i];
    }
    for (uint32_t block = 0; block < t->m.params.n_blocks; block++)
        kvant_plan_shift(t->m.plan, block, by[block]);
}

static void outside(trace *t, const line *l, step *s)
{
    const uint32_t stream = t->n_cells / SLOTS;
    if (l->kind == 'w')
        restore(t, l, s);
    else if (l->kind == 'k')
        shift(t, l);
    else if (l->kind == 'p')
        copy(&t->m, l->n_kv * stream, first_block(t, l), stream);
    for (uint32_t block = 0; l->kind == 'z' && block < t->m.params.n_blocks; block++)
        release(&t->m, (int32_t)block);
}

/* Replays */

static void read_new(trace *t, const line *l, uint32_t n_pages, uint32_t step_pages)
{
    assert_int_equal(l->kind, 'o');
    t->n_cells = l->n_kv;
    begin(&t->m,
          (kvant_plan_params){ l->stream * l->n_kv / SLOTS, n_pages, step_pages, FIRST, NEWEST, 0 },
          1);
}

/* Lines of one step, with one per stream, make one step of the plan. */
static uint64_t replay(const char *name, uint32_t n_pages, uint32_t step_pages, uint32_t *n_checked)
{
    static trace t;
    static line lines[2];
    static step s;
    char path[1024];
    snprintf(path, sizeof path, "%s/%s.trace", KVANT_TRACES, name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_true(read_line(file, &lines[0]));
    t.n_checked = 0;
    read_new(&t, &lines[0], n_pages, step_pages);
    bool more = read_line(file, &lines[0]);
    for (uint32_t at = 0; more; at = !at) {
        line *l = &lines[at], *next = &lines[!at];
        more = read_line(file, next);
        if (l->kind == 's') {
            release_unused(&t, l);
            add_line(&t, l, &s);
            if (!more || next->kind != 's' || next->step != l->step)
                take_step(&t, &s, l);
        } else {
            outside(&t, l, &s);
        }
        check(&t.m);
    }
    fclose(file);
    *n_checked = t.n_checked;
    const uint64_t digest = t.m.digest;
    end(&t.m);
    return digest;
}

/* A preset has 12 pages for one stream. With 4 pages only the step has room. */
CASE(recorded_traces)
{
    static const char *const names[] = { "message_removed", "slots_saved", "users_at_once" };
    static const uint32_t pages[][2] = { { 12, 8 }, { 16, 8 }, { 4, 2 } };
    for (size_t i = 0; i < COUNT(names); i++) {
        uint64_t digests[COUNT(pages)];
        uint32_t n_checked[COUNT(pages)], again;
        for (size_t j = 0; j < COUNT(pages); j++) {
            digests[j] = replay(names[i], pages[j][0], pages[j][1], &n_checked[j]);
            assert_true(digests[j] == replay(names[i], pages[j][0], pages[j][1], &again));
        }
        assert_true(digests[2] != digests[0]);
        print_message("%s: %u steps of one sequence had room in 12 pages, %u in 4\n", names[i],
                      n_checked[0], n_checked[2]);
        assert_true(n_checked[0] > 20 && n_checked[2] < n_checked[0]);
    }
}

RUN_CASES(NULL, NULL)
