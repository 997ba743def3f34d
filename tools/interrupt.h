/* interrupt.h - the first Ctrl-C asks a long command to stop and to print its complete results; the
 * second one kills it. */
#pragma once

#include <stdbool.h>

void interrupt_catch(void);
bool interrupted(void);
