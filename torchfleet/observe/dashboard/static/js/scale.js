// Where the axis of a chart ends.

const SHARE = 0.01, TIMES = 3;

/**
 * The largest value, without values that would flatten the others: of each line one, or one in a hundred of all, if they
 * are more than three times as large as the rest. The first pull of a job waits for the servers to start, for example.
 */
export function usualTop(lines) {
  const values = lines.flat().filter((value) => value !== null && value !== undefined).sort((a, b) => b - a);
  const num = Math.max(lines.length, Math.ceil(SHARE * values.length));
  const largest = values[0], rest = values[num];
  return rest > 0 && largest > TIMES * rest ? rest : largest;
}
