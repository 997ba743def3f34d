/* test_schedule.cpp - which pages the thread blocks of decode attention compute (schedule.cuh), and
 * the offsets that centres of pages add to scores (offsets.cuh), without a GPU. The warp of
 * warp.h runs the code.
 *
 * Every page of every pair is computed once. If several blocks share a pair, each knows how many
 * they are and where its partial result lies. */
#include "warp.h"

struct ushort2 {
    uint16_t x, y;
};

#include "device/attention/offsets.cuh"

#include <climits>
#include <random>
#include <vector>

Warp warp;

using namespace kvant;

static constexpr int WARPS = 8;
static std::mt19937 numbers(7);

static int below(int n)
{
    return (int)(numbers() % (unsigned)n);
}

/* ---- pieces ---- */

static struct {
    AttentionArgs args;
    int index, count;
} task;

static bool are_cut_alike;

template <bool GENERAL> static Piece<GENERAL> piece;

template <bool GENERAL> static void find()
{
    const Lengths<GENERAL, TILE_COLUMNS> lengths{ task.args };
    const auto found = find_piece(lengths, task.index, task.count, WARPS, warp.lane);
    if (warp.lane == 0)
        piece<GENERAL> = found;
}

struct OfPair {
    std::vector<int> taken; /* for each page: how often it was computed */
    std::vector<Share> parts;
    /* The numbers of the parts' blocks and pieces, and how many pages the parts have. */
    std::vector<int> blocks, pieces, pages;
};

template <bool GENERAL> static bool walk(std::vector<std::vector<OfPair>> &pairs)
{
    const Lengths<GENERAL, TILE_COLUMNS> lengths{ task.args };
    const Piece<GENERAL> &found = piece<GENERAL>;
    auto cursor = found.cursor;
    for (int i = found.begin, end; i < found.end; i = end) {
        cursor.seek(lengths, i);
        const int head = cursor.head(i), first = cursor.first + head * cursor.pages;
        end = min(found.end, first + cursor.pages);
        if (cursor.b >= (int)pairs.size() || head >= (int)pairs[cursor.b].size())
            return false;
        OfPair &pair = pairs[cursor.b][head];
        for (int page = i - first; page < end - first; page++) {
            if (page >= (int)pair.taken.size())
                return false;
            pair.taken[page]++;
        }
        pair.parts.push_back(share_of(found, first, first + cursor.pages));
        pair.pieces.push_back(found.index);
        pair.pages.push_back(end - i);
        pair.blocks.push_back(task.index);
        are_cut_alike &= found.parts > 0;
    }
    return true;
}

static bool is_right(const OfPair &pair)
{
    const int n = (int)pair.parts.size();
    std::vector<int> found(n); /* for each of the parts, in the order of their pages */
    for (const int times : pair.taken)
        if (times != 1)
            return false;
    if (n == 1)
        return pair.parts[0].whole;
    for (int i = 0; i < n; i++) {
        const Share &share = pair.parts[i];
        const int at = pair.pieces[i] - share.first_block;
        if (share.whole || share.n_blocks != n || at < 0 || at >= n || found[at]++ > 0 ||
            share.partial(at) != share.own)
            return false;
    }
    return true;
}

/* Whether late blocks, and the blocks with the newest pages, have hardly more pages of a pair than
 * other blocks. Without late blocks, these others differ by at most a page. */
static bool is_short_at_ends(const OfPair &pair, int n_late)
{
    const int n = (int)pair.parts.size();
    int most_short = 0, most = 0, least = INT_MAX;
    for (int i = 0; i < n; i++) {
        const bool late = pair.blocks[i] >= task.count - n_late,
                   newest = pair.pieces[i] - pair.parts[i].first_block >= n - OPEN_PARTS;
        int &longest = late || newest ? most_short : most;
        longest = max(longest, pair.pages[i]);
        least = late || newest ? least : min(least, pair.pages[i]);
    }
    return most == 0 || (most_short <= most + 1 && (n_late > 0 || most - least <= 1));
}

/* Whether the numbers of blocks without pages are not those of any piece. Their partial results and
 * counters are then their own. */
static bool are_alone(const std::vector<int> &idle, const std::vector<bool> &is_piece)
{
    for (const int block : idle) {
        const Share share = idle_share(block);
        if (is_piece[block] || share.whole || share.first_block != block || share.n_blocks != 1 ||
            share.partial(0) != share.own || share.own / 2 != block)
            return false;
    }
    return true;
}

template <bool GENERAL> static int check()
{
    const Lengths<GENERAL, TILE_COLUMNS> lengths{ task.args };
    std::vector<std::vector<OfPair>> pairs(task.args.batch);
    std::vector<int> idle;
    std::vector<bool> is_piece(task.count);
    bool empty = false, right = true;
    for (int b = 0; b < task.args.batch; b++) {
        pairs[b].resize(lengths.heads(b));
        empty |= lengths.pages(b) * lengths.heads(b) == 0;
        for (OfPair &pair : pairs[b])
            pair.taken.resize(lengths.pages(b));
    }
    are_cut_alike = true;
    for (task.index = 0; task.index < task.count; task.index++) {
        run_lanes(find<GENERAL>);
        right &= walk<GENERAL>(pairs) && (piece<GENERAL>.any_empty == empty);
        if (piece<GENERAL>.begin == piece<GENERAL>.end)
            idle.push_back(task.index);
        else
            is_piece[piece<GENERAL>.index] = true;
    }
    right &= are_alone(idle, is_piece);
    for (const auto &of_sequence : pairs)
        for (const OfPair &pair : of_sequence)
            right &= is_right(pair) && (!are_cut_alike || is_short_at_ends(pair, task.args.n_late));
    if (!right)
        printf("FAILED pieces of %d sequences, %d pairs each, %d blocks, general %d\n",
               task.args.batch, lengths.heads(0), task.count, GENERAL);
    return !right;
}

/* Sequences of one length, of lengths with the same number of pages, or of any length. */
static int check_pieces()
{
    int failed = 0;
    for (int i = 0; i < 150; i++) {
        AttentionArgs &p = task.args;
        p = AttentionArgs{};
        const int most = i % 3 == 0   ? 40000
                         : i % 3 == 1 ? 2000
                                      : 200,
                  all = 1 + below(most), kind = below(3);
        p.batch = i % 2 ? 1 : 1 + below(40);
        p.kv_heads = 1 + below(9);
        p.heads_a_kv = 1 + below(20);
        p.max_tokens = most + 64;
        p.query_tokens = 1;
        p.window = INT_MAX;
        p.groups = (p.heads_a_kv + TILE_COLUMNS - 1) / TILE_COLUMNS;
        p.heads_a_group = (p.heads_a_kv + p.groups - 1) / p.groups;
        std::vector<int32_t> lengths(p.batch);
        for (int32_t &length : lengths)
            length = kind == 0 ? all : kind == 1 ? (all + 63) / 64 * 64 - below(64) : below(most);
        p.lengths = lengths.data();
        std::vector<int32_t> starts(p.batch +
                                    1); /* of query rows: one for each sequence, or none */
        for (int b = 0; b < p.batch; b++)
            starts[b + 1] = starts[b] + (i % 8 > 3 || below(3) > 0);
        p.query_starts = i / 2 % 2 ? starts.data() : nullptr;
        task.count = 1 + below(132);
        p.n_late = below(2) ? 0 : below(task.count);
        failed += check<false>();
        p.query_starts = nullptr;
        p.query_tokens = 1 + below(6);
        p.window = below(2) ? INT_MAX : 1 + below(most);
        failed += check<true>();
    }
    return failed;
}

/* ---- offsets of pages ---- */

static struct {
    Pair pair;
    int first, step;
} offsets;

template <int D> static void find_offsets()
{
    put_offsets<D>(task.args, offsets.pair, offsets.first, offsets.step,
                   (int)task.args.table_stride, warp.lane);
}

/* Sums of D products of numbers that are rounded at most four times, in any order, err by (D + 4)
 * 2^-24 of their sizes. */
template <int D> static int check_offsets()
{
    constexpr int PAGES = 13, HEADS = 2, NUMBERS = 3;
    std::normal_distribution<float> normal;
    std::vector<float> phases(PAGES * D), start(NUMBERS * HEADS * D), q(HEADS * 8 * D);
    std::vector<uint8_t> of_page(PAGES);
    for (uint8_t &number : of_page)
        number = (uint8_t)below(NUMBERS);
    std::vector<uint16_t> channels(D);
    for (auto *some : { &phases, &start, &q })
        for (float &x : *some)
            x = normal(numbers);
    for (int i = 0; i < D; i++)
        channels[i] = (uint16_t)(i % 2 ? i / 2 + D / 2 : i / 2);
    AttentionArgs &p = task.args;
    int failed = 0;
    p = AttentionArgs{};
    p.kv_heads = HEADS;
    p.table_stride = PAGES;
    p.block_centers = { channels.data(), start.data(), phases.data(), of_page.data() };
    p.plain_q = q.data();
    p.plain_head_stride = D;
    p.query_tokens = 1;
    for (p.heads_a_kv = 1; p.heads_a_kv <= 8; p.heads_a_kv++) {
        std::vector<float> found(HEADS * PAGES * p.heads_a_kv, NAN);
        p.own_offsets = found.data();
        offsets.pair = Pair{ 0, 1, 0, p.heads_a_kv };
        offsets.step = p.heads_a_kv % 2 ? 1 : 3;
        for (offsets.first = 0; offsets.first < offsets.step; offsets.first++)
            run_lanes(find_offsets<D>);
        for (int page = 0; page < PAGES; page++)
            for (int n = 0; n < p.heads_a_kv; n++) {
                double sum = 0, size = 0;
                for (int i = 0; i < D / 2; i++) {
                    const int x = channels[2 * i], y = channels[2 * i + 1];
                    const float *from = &start[(of_page[page] * HEADS + 1) * D],
                                *row = &q[(p.heads_a_kv + n) * D];
                    const double cosine = phases[page * D + i], sine = phases[page * D + D / 2 + i];
                    sum += row[x] * (from[x] * cosine - from[y] * sine) +
                           row[y] * (from[y] * cosine + from[x] * sine);
                    size += fabs(row[x]) * (fabs(from[x] * cosine) + fabs(from[y] * sine)) +
                            fabs(row[y]) * (fabs(from[y] * cosine) + fabs(from[x] * sine));
                }
                const float own = found[(PAGES + page) * p.heads_a_kv + n];
                failed += !(fabs(own - sum) <= (D + 4) * 0x1p-24 * size);
            }
    }
    if (failed)
        printf("FAILED offsets of pages at head_dim %d\n", D);
    return failed;
}

int main()
{
    const int failed = check_pieces() + check_offsets<64>() + check_offsets<96>() +
                       check_offsets<128>() + check_offsets<256>();
    printf("%d failed\n", failed);
    return failed != 0;
}
