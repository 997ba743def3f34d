/* interrupt.c - a flag set by SIGINT, which C11 has on every system. */
#include "interrupt.h"

#include <signal.h>

static volatile sig_atomic_t stop;

static void on_signal(int number)
{
    signal(number, SIG_DFL); /* the second one ends the process */
    stop = 1;
}

void interrupt_catch(void)
{
    signal(SIGINT, on_signal);
}

bool interrupted(void)
{
    return stop != 0;
}
