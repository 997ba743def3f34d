/* trellis_in_place.h - the trellis search for 256 states. Their metrics stay in place, in 16
 * vectors of 16 numbers.
 *
 * A new state takes the place of a preceding state. The numbers of both states differ in the bit
 * that leaves the window and in the bit that enters it. The index of the place has one bit for
 * both. In 4 of 8 steps this bit selects a vector, so no vector is shuffled. In the remaining steps
 * a metric is compared with the metric of a lane whose number differs in this bit. Before the first
 * of 8 steps, place i holds the metric of state i. Step t of the 8 uses bit 7 - t of the place.
 *
 * Instead of decisions, a place keeps a byte: the place of its path before the first of 8 steps. A
 * trace goes back 8 steps by one look-up, because the last 8 bits of a path are its state. */
#define PLACE_STATES 256u
#define PLACE_VECTORS 16u
#define PLACE_STEPS 8u

#define PLACE_TAP(p, j) ((KVANT_TRELLIS_256_TAP_##p >> (j) & 1) << (p))
/* The effect of bit `bit` of the place on the subset of the window at step t, where it is bit t +
 * bit + 1 of the window. The step's own bit is both the newest and the oldest bit of the window. In
 * the state that follows in the same place, their effects cancel each other. */
#define PLACE_EFFECT_OF(j) ((j) == 0 ? 0 : PLACE_TAP(0, j) | PLACE_TAP(1, j) | PLACE_TAP(2, j))
#define PLACE_EFFECT(t, bit) PLACE_EFFECT_OF(((t) + (bit) + 1) % 8)

#define LANE_EFFECT(t, lane, bit) ((lane) >> (bit) & 1 ? PLACE_EFFECT(t, bit) : 0)
#define LANE_SUBSET(t, lane)                                                                       \
    (LANE_EFFECT(t, lane, 0) ^ LANE_EFFECT(t, lane, 1) ^ LANE_EFFECT(t, lane, 2) ^                 \
     LANE_EFFECT(t, lane, 3))
#define LANE_BYTES(t, lane) 0x0100 + 0x0202 * (LANE_SUBSET(t, lane))
#define FOUR_LANES(t, lane)                                                                        \
    LANE_BYTES(t, lane), LANE_BYTES(t, (lane) + 1), LANE_BYTES(t, (lane) + 2),                     \
        LANE_BYTES(t, (lane) + 3)
#define ALL_LANES(t) { FOUR_LANES(t, 0), FOUR_LANES(t, 4), FOUR_LANES(t, 8), FOUR_LANES(t, 12) }

/* The subsets of the lanes of vector 0, as bytes for pshufb. */
static const _Alignas(32) uint16_t lane_subsets[PLACE_STEPS][16] = { ALL_LANES(0), ALL_LANES(1),
                                                                     ALL_LANES(2), ALL_LANES(3),
                                                                     ALL_LANES(4), ALL_LANES(5),
                                                                     ALL_LANES(6), ALL_LANES(7) };

/* The metrics. Byte pairs of `from` belong to vectors v and v + 8: the place of each path before
 * the 8 steps. */
typedef struct places {
    __m256i metric[PLACE_VECTORS], from[PLACE_VECTORS / 2];
} places;

KVANT_INLINE uint32_t vector_subset(uint32_t t, uint32_t v)
{
    const int subset = (v & 1 ? PLACE_EFFECT(t, 4) : 0) ^ (v & 2 ? PLACE_EFFECT(t, 5) : 0) ^
                       (v & 4 ? PLACE_EFFECT(t, 6) : 0) ^ (v & 8 ? PLACE_EFFECT(t, 7) : 0);
    return (uint32_t)subset;
}

/* The costs of a vector's lanes when its subset differs from vector 0's by z. t is a constant, so
 * the compiler drops the costs that are not used. */
KVANT_INLINE void spread_in_place(const uint16_t *row, uint32_t t,
                                  __m256i costs[KVANT_TRELLIS_SUBSETS])
{
    const __m256i lanes = _mm256_load_si256((const __m256i *)lane_subsets[t]);
    const __m256i even = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)row));
    const __m256i odd = _mm256_or_si256(_mm256_slli_epi32(even, 16), _mm256_srli_epi32(even, 16));
    costs[0] = _mm256_shuffle_epi8(even, lanes);
    costs[1] = _mm256_shuffle_epi8(odd, lanes);
    costs[2] = _mm256_shuffle_epi8(_mm256_shuffle_epi32(even, 0xb1), lanes);
    costs[3] = _mm256_shuffle_epi8(_mm256_shuffle_epi32(odd, 0xb1), lanes);
    costs[4] = _mm256_shuffle_epi8(_mm256_shuffle_epi32(even, 0x4e), lanes);
    costs[5] = _mm256_shuffle_epi8(_mm256_shuffle_epi32(odd, 0x4e), lanes);
    costs[6] = _mm256_shuffle_epi8(_mm256_shuffle_epi32(even, 0x1b), lanes);
    costs[7] = _mm256_shuffle_epi8(_mm256_shuffle_epi32(odd, 0x1b), lanes);
}

/* Exchanges lanes whose numbers differ in this bit. */
KVANT_INLINE __m256i exchange_halves(__m256i v, uint32_t bit)
{
    switch (bit) {
    case 0: return _mm256_or_si256(_mm256_slli_epi32(v, 16), _mm256_srli_epi32(v, 16));
    case 1: return _mm256_shuffle_epi32(v, 0xb1);
    case 2: return _mm256_shuffle_epi32(v, 0x4e);
    default: return _mm256_permute4x64_epi64(v, 0x4e);
    }
}

KVANT_INLINE __m256i exchange_bytes(__m256i v, uint32_t bit)
{
    switch (bit) {
    case 0: return _mm256_or_si256(_mm256_slli_epi16(v, 8), _mm256_srli_epi16(v, 8));
    case 1: return _mm256_or_si256(_mm256_slli_epi32(v, 16), _mm256_srli_epi32(v, 16));
    case 2: return _mm256_shuffle_epi32(v, 0xb1);
    default: return _mm256_permute4x64_epi64(v, 0x4e);
    }
}

/* Lanes of b where the lane's number has the bit set, lanes of a elsewhere. */
KVANT_INLINE __m256i by_lane(__m256i a, __m256i b, uint32_t bit)
{
    switch (bit) {
    case 0: return _mm256_blend_epi16(a, b, 0xaa);
    case 1: return _mm256_blend_epi16(a, b, 0xcc);
    case 2: return _mm256_blend_epi16(a, b, 0xf0);
    default: return _mm256_blend_epi32(a, b, 0xf0);
    }
}

/* All bits set in the bytes that belong to a lane whose number has the bit set. */
KVANT_INLINE __m256i odd_bytes(uint32_t bit)
{
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi8(-1);
    switch (bit) {
    case 0: return _mm256_set1_epi16((int16_t)0xff00);
    case 1: return _mm256_set1_epi32((int32_t)0xffff0000);
    case 2: return _mm256_set1_epi64x((int64_t)0xffffffff00000000);
    default: return _mm256_blend_epi32(zero, ones, 0xf0);
    }
}

/* One step for vectors a and b, whose numbers differ in the step's bit. first: all bits set where
 * the better path came from a. */
KVANT_INLINE void meet_vectors(__m256i *a, __m256i *b, __m256i near, __m256i far, __m256i first[2])
{
    const __m256i low[2] = { _mm256_adds_epu16(*a, near), _mm256_adds_epu16(*a, far) };
    const __m256i high[2] = { _mm256_adds_epu16(*b, far), _mm256_adds_epu16(*b, near) };
    *a = _mm256_min_epu16(low[0], high[0]);
    *b = _mm256_min_epu16(low[1], high[1]);
    first[0] = _mm256_cmpeq_epi16(*a, low[0]);
    first[1] = _mm256_cmpeq_epi16(*b, low[1]);
}

KVANT_INLINE __m256i meet_lanes(__m256i *v, uint32_t bit, __m256i near, __m256i far)
{
    const __m256i own = _mm256_adds_epu16(*v, near);
    const __m256i other = _mm256_adds_epu16(exchange_halves(*v, bit), far);
    *v = _mm256_min_epu16(own, other);
    return _mm256_cmpeq_epi16(*v, by_lane(own, other, bit));
}

/* The first of 8 steps. */
KVANT_INLINE void meet_top(places *p, const __m256i *costs, uint32_t v, bool keep)
{
    static const _Alignas(32)
        uint8_t numbers[32] = { 0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31 };
    const uint32_t z = vector_subset(0, v);
    __m256i first[2];
    meet_vectors(&p->metric[v], &p->metric[v + 8], costs[z], costs[z ^ KVANT_TRELLIS_SWAP], first);
    if (keep) {
        const __m256i all = _mm256_or_si256(_mm256_load_si256((const __m256i *)numbers),
                                            _mm256_set1_epi8((int8_t)(32 * v | 8)));
        p->from[v] = _mm256_xor_si256(
            all, _mm256_and_si256(_mm256_packs_epi16(first[0], first[1]), _mm256_set1_epi8(8)));
    }
}

KVANT_INLINE void meet_pairs(places *p, const __m256i *costs, uint32_t t, uint32_t v, uint32_t w,
                             bool keep)
{
    __m256i low[2], high[2];
    const uint32_t z = vector_subset(t, v), y = vector_subset(t, v + 8);
    meet_vectors(&p->metric[v], &p->metric[w], costs[z], costs[z ^ KVANT_TRELLIS_SWAP], low);
    meet_vectors(&p->metric[v + 8], &p->metric[w + 8], costs[y], costs[y ^ KVANT_TRELLIS_SWAP],
                 high);
    if (keep) {
        const __m256i a = p->from[v], b = p->from[w];
        p->from[v] = _mm256_blendv_epi8(b, a, _mm256_packs_epi16(low[0], high[0]));
        p->from[w] = _mm256_blendv_epi8(b, a, _mm256_packs_epi16(low[1], high[1]));
    }
}

KVANT_INLINE void meet_inside(places *p, const __m256i *costs, uint32_t t, uint32_t v, bool keep)
{
    const uint32_t bit = 7 - t, z = vector_subset(t, v), y = vector_subset(t, v + 8);
    const __m256i low = meet_lanes(&p->metric[v], bit, costs[z], costs[z ^ KVANT_TRELLIS_SWAP]);
    const __m256i high =
        meet_lanes(&p->metric[v + 8], bit, costs[y], costs[y ^ KVANT_TRELLIS_SWAP]);
    if (keep) {
        const __m256i own = _mm256_xor_si256(_mm256_packs_epi16(low, high), odd_bytes(bit));
        p->from[v] = _mm256_blendv_epi8(exchange_bytes(p->from[v], bit), p->from[v], own);
    }
}

/* Advances by step t of 8; t and keep are constants. */
KVANT_INLINE void advance_in_place(places *p, const uint16_t *row, uint32_t t, bool keep)
{
    __m256i costs[KVANT_TRELLIS_SUBSETS];
    spread_in_place(row, t, costs);
#pragma GCC unroll 8
    for (uint32_t v = 0; v < PLACE_VECTORS / 2; v++) {
        if (t == 0)
            meet_top(p, costs, v, keep);
        else if (t > 3)
            meet_inside(p, costs, t, v, keep);
        else if (!(v & 8u >> t))
            meet_pairs(p, costs, t, v, v | 8u >> t, keep);
    }
}

KVANT_INLINE void lower_places(places *p)
{
    __m256i least = p->metric[0];
#pragma GCC unroll 16
    for (uint32_t v = 1; v < PLACE_VECTORS; v++)
        least = _mm256_min_epu16(least, p->metric[v]);
    __m128i half = _mm_min_epu16(_mm256_castsi256_si128(least), _mm256_extracti128_si256(least, 1));
    least = _mm256_broadcastw_epi16(_mm_minpos_epu16(half));
#pragma GCC unroll 16
    for (uint32_t v = 0; v < PLACE_VECTORS; v++)
        p->metric[v] = _mm256_sub_epi16(p->metric[v], least);
}

/* After a step t without a number, whose code is 0: rules out all paths with a 1 there. */
KVANT_INLINE void rule_out_ones(places *p, uint32_t t)
{
    const __m256i zero = _mm256_setzero_si256(), most = _mm256_set1_epi16(-1);
#pragma GCC unroll 16
    for (uint32_t v = 0; v < PLACE_VECTORS; v++)
        if (t > 3)
            p->metric[v] = _mm256_or_si256(p->metric[v], by_lane(zero, most, 7 - t));
        else if (v & 8u >> t)
            p->metric[v] = most;
}

/* The state of a pass. */
typedef struct place_pass {
    const kvant_trellis *trellis;
    const uint16_t *cells;
    uint32_t n, at, step; /* at: the step on the circle; step: the step of the pass */
} place_pass;

KVANT_INLINE void eight_steps(place_pass *pass, places *p, bool keep)
{
    if (pass->step && pass->step % PATH_LOWER_STEPS == 0)
        lower_places(p);
#pragma GCC unroll 8
    for (uint32_t t = 0; t < PLACE_STEPS; t++) {
        const uint32_t cell = pass->cells[pass->at + t];
        advance_in_place(p, pass->trellis->costs[cell], t, keep);
        if (KVANT_UNLIKELY(cell == KVANT_TRELLIS_NO_NUMBER))
            rule_out_ones(p, t);
    }
    pass->at = pass->at + PLACE_STEPS < pass->n ? pass->at + PLACE_STEPS : 0;
    pass->step += PLACE_STEPS;
}

/* Runs the pass from step -before on; before and n are multiples of 8. The metrics are from before
 * the pass on entry, and from after it on return. The array `from` gets the places of paths before
 * each 8 steps of the circle. There are two loops, because in a single loop GCC 12 computes the
 * common parts of both kinds of steps at once and spills them. */
static void pass_in_place(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,
                          uint32_t before, uint16_t *metric, uint8_t *from)
{
    place_pass pass = { trellis, cells, n, (n - before % n) % n, 0 };
    places p;
#pragma GCC unroll 16
    for (uint32_t v = 0; v < PLACE_VECTORS; v++)
        p.metric[v] = _mm256_loadu_si256((const __m256i *)(metric + 16 * v));
    while (pass.step < before)
        eight_steps(&pass, &p, false);
    for (; pass.step < before + n; from += PLACE_STATES) {
        eight_steps(&pass, &p, true);
#pragma GCC unroll 8
        for (uint32_t v = 0; v < PLACE_VECTORS / 2; v++)
            _mm256_storeu_si256((__m256i *)(from + 32 * v), p.from[v]);
    }
#pragma GCC unroll 16
    for (uint32_t v = 0; v < PLACE_VECTORS; v++)
        _mm256_storeu_si256((__m256i *)(metric + 16 * v), p.metric[v]);
}

/* The place of a state's byte in `from`. The bits of a state are h vvv l kkk: its byte is in vector
 * v, in the 128-bit half l, and there in the 64-bit half h. */
KVANT_INLINE uint32_t place_of(uint32_t state)
{
    return (state & 7) | state >> 7 << 3 | (state & 0x78) << 1;
}

KVANT_INLINE uint32_t state_at(uint32_t place)
{
    return (place & 7) | (place & 8) << 4 | (place & 0xf0) >> 1;
}

/* The 8 bits of the state at a place, the oldest first. */
KVANT_INLINE void put_bits(uint32_t place, uint8_t bits[8])
{
    const uint64_t one_each = place * 0x0101010101010101u & 0x0102041020408008u;
    const uint64_t ones = (one_each + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
    memcpy(bits, &ones, sizeof ones);
}

KVANT_INLINE uint32_t trace_in_place(uint32_t n, const uint8_t *from, uint32_t place, uint8_t *bits)
{
    for (uint32_t step = n; step; step -= PLACE_STEPS) {
        put_bits(place, bits + step - PLACE_STEPS);
        place = from[(step / PLACE_STEPS - 1) * PLACE_STATES + place];
    }
    return place;
}

static void path_in_place(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,
                          const kvant_trellis_work *work, uint8_t *bits)
{
    uint8_t *from = (uint8_t *)work->decisions;
    memset(work->metric, 0, PLACE_STATES * sizeof *work->metric);
    pass_in_place(trellis, cells, n, KVANT_TRELLIS_WARM_UP, work->metric, from);
    uint32_t end = place_of(NAME(best)(work->metric, PLACE_STATES));
    for (uint32_t tries = 0; tries < PATH_TRIES; tries++) {
        const uint32_t begin = trace_in_place(n, from, end, bits);
        if (begin == end)
            return;
        end = begin;
    }
    memset(work->metric, 0xff, PLACE_STATES * sizeof *work->metric);
    work->metric[state_at(end)] = 0;
    pass_in_place(trellis, cells, n, 0, work->metric, from);
    trace_in_place(n, from, end, bits);
}

static bool has_places(const kvant_trellis *trellis, uint32_t n, const kvant_trellis_work *work)
{
    return trellis->memory == 8 && n % PLACE_STEPS == 0 && work->room >= n;
}
