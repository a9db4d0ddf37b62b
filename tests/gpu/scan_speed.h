#pragma once

namespace holdfast {

// Prints the table of speeds. False when a result of what was timed is wrong.
bool measure_speed();

}  // namespace holdfast
