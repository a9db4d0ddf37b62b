// SIGUSR1 and SIGTERM as an operator's wish to stop in order.
#pragma once

namespace holdfast::train {

// From now on the two signals no longer end the process but make stop_requested() true. mpirun forwards
// SIGUSR1 to every rank at once; a SIGTERM to mpirun reaches the ranks too, but mpirun kills them a moment
// later.
void install_stop_signals();
bool stop_requested();
bool asked_to_end();  // SIGTERM came, and with it perhaps SIGKILL a second later

}  // namespace holdfast::train
