/* align.c - see align.h. */
#include "align.h"

#include <stdlib.h>
#include <string.h>

#include <kvant/codec.h>

#include "host.h"

/* A state with more fillers than rows, and than this, is not worth the cells. */
#define MOST_FILLERS 4096u

enum { F16 = 1 }; /* ggml's number of the type */

/* Noting */

bool kvp_align_note(kvp_alignment *a, const kvp_align_place *places, size_t n)
{
    if (a->n + n > a->room) {
        const size_t room = 2 * (a->n + n);
        kvp_align_place *more = realloc(a->places, room * sizeof(*more));
        if (more == NULL)
            return false;
        a->places = more;
        a->room = room;
    }
    if (n > 0)
        memcpy(a->places + a->n, places, n * sizeof(*places));
    a->n += n;
    return true;
}

void kvp_align_free(kvp_alignment *a)
{
    free(a->places);
    free(a->is_filler);
    free(a->first);
    *a = (kvp_alignment){ 0 };
}

/* Planning */

/* The i-th cell that llama.cpp gives to a state. Cells behind the rows are not known, and mostly
 * follow the last one. If they do not, the blocks do not fit, and their rows are decoded. */
static int64_t cell_at(const kvp_alignment *a, size_t i)
{
    return i < a->n ? a->places[i].cell : a->places[a->n - 1].cell + 1 + (int64_t)(i - a->n);
}

static bool add_cells(kvp_alignment *a, size_t n, bool is_filler)
{
    if (a->n_all + n > a->room_all) {
        const size_t room = 2 * (a->n_all + n);
        bool *more = realloc(a->is_filler, room * sizeof(*more));
        if (more == NULL)
            return false;
        a->is_filler = more;
        a->room_all = room;
    }
    memset(a->is_filler + a->n_all, is_filler, n * sizeof(*a->is_filler));
    a->n_all += n;
    return a->n_all <= 2 * a->n + MOST_FILLERS && a->n_all <= UINT32_MAX;
}

/* Adds fillers until the next 64 cells are a block. */
static bool find_block(kvp_alignment *a)
{
    size_t n = 0;

    while (n < KVANT_PAGE_TOKENS) {
        const int64_t cell = cell_at(a, a->n_all + n);
        if (cell % KVANT_PAGE_TOKENS == (int64_t)n &&
            (n == 0 || cell == cell_at(a, a->n_all + n - 1) + 1))
            n++;
        else if (!add_cells(a, n > 0 ? n : 1, true))
            return false;
        else
            n = 0;
    }
    return true;
}

/* Adds the cells of a block, with fillers in slots that have no row. Returns the first row behind
 * the block, or 0. */
static size_t add_block(kvp_alignment *a, size_t row)
{
    size_t end = row + 1;

    while (end < a->n && !a->places[end].begins)
        end++;
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++) {
        const bool has_row = row < end && a->places[row].slot == slot;
        if (!add_cells(a, 1, !has_row))
            return 0;
        row += has_row;
    }
    return row == end ? end : 0;
}

bool kvp_align_plan(kvp_alignment *a)
{
    bool ok = a->n > 0;

    for (size_t row = 0; ok && row < a->n;) {
        row = find_block(a) ? add_block(a, row) : 0;
        ok = row > 0;
    }
    if (!ok) {
        free(a->is_filler);
        a->is_filler = NULL;
    }
    return ok;
}

/* llama.cpp's state */

/* The form of a state: cells, some words, then tensors of keys and of values, each with a head. */
typedef struct form {
    size_t cells, tensors; /* places of the cells and of the first tensor */
    size_t words;          /* bytes between them */
    uint32_t n_tensors;
    int32_t last; /* the largest position */
} form;

typedef struct cell_head {
    int32_t position;
    uint32_t n_sequences;
    int32_t sequence;
} cell_head;

/* A tensor's type and the bytes of a row, which is not aligned. */
enum { TENSOR_HEAD = sizeof(int32_t) + sizeof(uint64_t) };

static uint32_t word_at(const kvp_plain *plain, size_t at)
{
    uint32_t word;

    memcpy(&word, plain->bytes + at, sizeof(word));
    return word;
}

static size_t row_at(const kvp_plain *plain, size_t tensor)
{
    uint64_t bytes;

    memcpy(&bytes, plain->bytes + tensor + sizeof(int32_t), sizeof(bytes));
    return bytes <= SIZE_MAX ? (size_t)bytes : 0;
}

/* Reads the cells of a state. Words follow the cells: whether values are transposed, and the number
 * of layers. A newer llama.cpp (LLAMA_STATE_SEQ_VERSION 4) also writes the sizes of two rotations.
 * `words`: their bytes. */
static bool read_cells(const kvp_alignment *a, const kvp_plain *plain, size_t words, form *f)
{
    const size_t bytes = a->n * sizeof(cell_head), head = 2 * sizeof(uint32_t), /* before them */
        first = (size_t)plain->runs[0].at;

    if (first < head + bytes + words + TENSOR_HEAD)
        return false;
    *f = (form){ .cells = first - TENSOR_HEAD - words - bytes,
                 .tensors = first - TENSOR_HEAD,
                 .words = words };
    if (word_at(plain, f->cells - head) != 1 || /* streams */
        word_at(plain, f->cells - sizeof(uint32_t)) != a->n ||
        word_at(plain, f->cells + bytes) != 0 || /* values are not transposed */
        word_at(plain, f->cells + bytes + sizeof(uint32_t)) > UINT32_MAX / 2)
        return false;
    f->n_tensors = 2 * word_at(plain, f->cells + bytes + sizeof(uint32_t));
    for (size_t i = 0; i < a->n; i++) {
        cell_head cell;
        memcpy(&cell, plain->bytes + f->cells + i * sizeof(cell), sizeof(cell));
        if (cell.position < 0 || cell.n_sequences != 1)
            return false;
        f->last = cell.position > f->last ? cell.position : f->last;
    }
    return f->n_tensors > 0;
}

/* Whether the tensors have nothing but runs, and the state ends with them. */
static bool has_runs_only(const kvp_alignment *a, const kvp_plain *plain, const form *f)
{
    size_t at = f->tensors;
    uint32_t run = 0;

    for (uint32_t t = 0; t < f->n_tensors; t++) {
        size_t row, end;
        if (plain->n - at < TENSOR_HEAD || word_at(plain, at) != F16)
            return false;
        row = row_at(plain, at);
        at += TENSOR_HEAD;
        if (row == 0 || a->n > (plain->n - at) / row)
            return false;
        for (end = at + a->n * row; at < end; at += (size_t)plain->runs[run++].room)
            if (run == plain->n_runs || plain->runs[run].at != at ||
                plain->runs[run].room % row != 0 || plain->runs[run].room > end - at)
                return false;
    }
    return at == plain->n && run == plain->n_runs;
}

static void write_cells(const kvp_alignment *a, const uint8_t *from, uint8_t *to)
{
    cell_head first, cell;
    int32_t position = a->position;

    memcpy(&first, from, sizeof(first));
    for (size_t i = 0; i < a->n_all; i++, to += sizeof(cell)) {
        cell = (cell_head){ position, 1, first.sequence };
        if (a->is_filler[i]) {
            position++;
        } else {
            memcpy(&cell, from, sizeof(cell));
            from += sizeof(cell);
        }
        memcpy(to, &cell, sizeof(cell));
    }
}

/* The cell of the row that follows `rows` rows from this cell on. */
static uint32_t cell_behind(const kvp_alignment *a, uint32_t cell, size_t rows)
{
    for (; a->is_filler[cell] || rows > 0; cell++)
        rows -= !a->is_filler[cell];
    return cell;
}

/* Moves the runs of a tensor to their places behind its new head. Returns the first run behind
 * them. */
static uint32_t move_runs(kvp_alignment *a, kvp_plain *plain, uint32_t run, size_t row,
                          size_t rows_at)
{
    const uint32_t begin = run;
    uint32_t end = run, cell = 0;
    size_t rows = 0; /* of the run before */

    for (size_t n = 0; n < a->n; end++, n += rows) {
        cell = cell_behind(a, cell, rows);
        a->first[end] = end == begin ? 0 : cell;
        rows = (size_t)(plain->runs[end].room / row);
    }
    for (; run < end; run++) {
        const size_t behind = run + 1 < end ? a->first[run + 1] : a->n_all;
        plain->runs[run].at = rows_at + a->first[run] * row;
        plain->runs[run].room = (behind - a->first[run]) * row;
    }
    return end;
}

/* Bytes of the state with fillers; 0: this machine cannot count them. */
static size_t bytes_with_fillers(const kvp_alignment *a, const kvp_plain *plain, const form *f)
{
    const size_t more = a->n_all - a->n;
    size_t at = f->tensors, bytes = plain->n + more * sizeof(cell_head);

    for (uint32_t t = 0; t < f->n_tensors; t++) {
        const size_t row = row_at(plain, at);
        if (row > (SIZE_MAX / 2 - bytes) / more)
            return 0;
        bytes += more * row;
        at += TENSOR_HEAD + a->n * row;
    }
    return bytes;
}

/* Writes everything but the runs, and moves these. */
static void write_state(kvp_alignment *a, kvp_plain *plain, const form *f, uint8_t *to)
{
    const uint32_t n_all = (uint32_t)a->n_all;
    size_t from = f->tensors - f->words, at = f->cells + a->n_all * sizeof(cell_head);
    uint32_t run = 0;

    memcpy(to, plain->bytes, f->cells);
    memcpy(to + f->cells - sizeof(n_all), &n_all, sizeof(n_all));
    write_cells(a, plain->bytes + f->cells, to + f->cells);
    memcpy(to + at, plain->bytes + from, f->words);
    from += f->words;
    at += f->words;
    for (uint32_t t = 0; t < f->n_tensors; t++) {
        const size_t row = row_at(plain, from);
        memcpy(to + at, plain->bytes + from, TENSOR_HEAD);
        from += TENSOR_HEAD + a->n * row;
        at += TENSOR_HEAD;
        run = move_runs(a, plain, run, row, at);
        at += a->n_all * row;
    }
}

bool kvp_align_state(kvp_alignment *a, kvp_plain *plain)
{
    kvp_plain to;
    size_t bytes;
    form f;

    if (a->n_all <= a->n ||
        !(read_cells(a, plain, 2 * sizeof(uint32_t), &f) ||
          read_cells(a, plain, 4 * sizeof(uint32_t), &f)) ||
        !has_runs_only(a, plain, &f) || f.last > INT32_MAX - (int32_t)(a->n_all - a->n))
        return false;
    bytes = bytes_with_fillers(a, plain, &f);
    free(a->first);
    a->first = malloc(plain->n_runs * sizeof(*a->first));
    if (bytes == 0 || a->first == NULL || !kvp_plain_create(&to, bytes))
        return false;
    a->position = f.last + 1;
    write_state(a, plain, &f, to.bytes);
    kvp_host_release(plain->bytes, plain->n);
    plain->bytes = to.bytes;
    plain->n = to.n;
    return true;
}

const bool *kvp_align_fillers(const kvp_alignment *a, const kvp_plain *plain, const void *bytes,
                              size_t *n)
{
    uint32_t low = 0, high = plain->n_runs;
    uint64_t at;

    if (a->position == 0 || !kvp_plain_has(plain, bytes, 1))
        return NULL;
    at = (uint64_t)((const uint8_t *)bytes - plain->bytes);
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (plain->runs[middle].at < at)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == plain->n_runs || plain->runs[low].at != at)
        return NULL;
    *n = low + 1 < plain->n_runs && a->first[low + 1] > a->first[low]
             ? a->first[low + 1] - a->first[low]
             : a->n_all - a->first[low];
    return a->is_filler + a->first[low];
}
