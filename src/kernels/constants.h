/* constants.h - calls with a small number as a constant. CALL(n) is a call of an inlined function,
 * which is compiled once for each number. So loops up to this number are unrolled. */
#pragma once

#define KVANT_CASES_1(CALL)                                                                        \
    case 1: CALL(1); break;
#define KVANT_CASES_2(CALL)                                                                        \
    KVANT_CASES_1(CALL)                                                                            \
    case 2: CALL(2); break;
#define KVANT_CASES_3(CALL)                                                                        \
    KVANT_CASES_2(CALL)                                                                            \
    case 3: CALL(3); break;
#define KVANT_CASES_4(CALL)                                                                        \
    KVANT_CASES_3(CALL)                                                                            \
    case 4: CALL(4); break;
#define KVANT_CASES_5(CALL)                                                                        \
    KVANT_CASES_4(CALL)                                                                            \
    case 5: CALL(5); break;
#define KVANT_CASES_6(CALL)                                                                        \
    KVANT_CASES_5(CALL)                                                                            \
    case 6: CALL(6); break;
#define KVANT_CASES_8(CALL)                                                                        \
    KVANT_CASES_6(CALL)                                                                            \
    case 7: CALL(7); break;                                                                        \
    case 8: CALL(8); break;

/* CALL(n) for an n from 1 to most, which is a literal or a macro of one. Calls nothing for 0. */
#define KVANT_CALL_CONSTANT(n, most, CALL) KVANT_CALL_LITERAL(n, most, CALL)
#define KVANT_CALL_LITERAL(n, most, CALL)                                                          \
    switch (n) {                                                                                   \
        KVANT_CASES_##most(CALL)                                                                   \
    }
