/* trace.h - KVANT_TRACE=FILE: a record of llama.cpp's use of its caches, as lines of text that can
 * be replayed.
 *
 * The file says which cells of a cache every graph wrote and which cells its queries could see. It
 * also has every change of cells outside of graphs. It holds no keys, no values and no text. Its
 * reader is bench/traces/replay.py. A cache's lines come from its first tensor of keys alone,
 * because all tensors of a buffer have the same cells. Caches in the memory of a GPU are not
 * recorded.
 *
 * Format, version 1. A process appends the line "kvant-trace 1" and then lines of eight columns
 * with one blank between two columns:
 *
 *     kind cache step stream n_kv slots positions visible
 *
 *   kind       one letter, see below
 *   cache      number of the cache in this process, from 1
 *   step       number of the cache's last graph, from 1; 0 before the first one
 *   stream     from 0
 *   n_kv       how many cells of the stream attention reads
 *   slots      cells of the stream, from 0, in the order in which llama.cpp names them
 *   positions  one per slot, or "-" where they are not known
 *   visible    cells of the stream that a query of the graph can see, ascending
 *
 * The last three columns are lists of runs without blanks. The run "5+3" is 5, 6, 7, and "-2*3" is
 * -2, -2, -2. A comma stands between two runs. "-" is the empty list. A column that a kind does not
 * use is 0 or "-".
 *
 *   o  a cache is new: stream is its number of streams, n_kv the cells of one stream
 *   s  a graph wrote the slots, and its queries then saw the visible cells; a graph that serves
 *      several streams has a line per stream, with the same step
 *   w  rows were written outside of a graph: a state that is restored, for example
 *   p  a stream became a copy of the stream that n_kv names
 *   k  the keys of the slots were rotated to other positions; positions has the distances
 *   z  all cells were cleared
 *   x  the cache was freed; its number does not come again
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvant/attention.h>

#include "kv_tensor.h"

/* Whether there is a trace. Callers ask before they call any other function here, so a process
 * without a trace spends one test per call. */
extern bool kvp_trace_is_on;

/* Opens the file that KVANT_TRACE names; called once, before any cache exists. If the file cannot
 * be written, one line appears on stderr and there is no trace. The same happens when a write fails
 * later. */
void kvp_trace_open(void);

/* Records that a graph stores n rows in these cells, numbered over all streams. positions: NULL
 * where they are not known. */
void kvp_trace_rows(const kvp_kv *kv, const int64_t *cells, size_t n, const int32_t *positions);

/* Records that the same graph reads a stream of these keys. */
void kvp_trace_attention(const kvp_kv *kv, size_t stream, const kvant_attention_problem *problem);

/* Records that nominal bytes are written outside of a graph. */
void kvp_trace_write(const kvp_kv *kv, size_t offset, size_t size);

/* Records that a stream became a copy of a stream of the same or of another cache. */
void kvp_trace_copy(const kvp_kv *from, uint32_t from_stream, const kvp_kv *to, uint32_t to_stream);

/* Records that the key of each of n cells, numbered over all streams, is rotated by a number of
 * positions. */
void kvp_trace_shift(const kvp_kv *kv, const int32_t *by, size_t n);

/* Records that a buffer (kvp_kv's cache) is cleared or freed. */
void kvp_trace_clear(const void *cache);
void kvp_trace_close(const void *cache);
