/** Whether the reader has a job before their eyes. */

/** The part of a view, from 0 to 1, that says how its job stands. */
const ENOUGH = 0.2;

/** Whether a view of `job` is on the screen: not scrolled away, behind another tab or in a page in the background. */
export async function isInSight(job: string): Promise<boolean> {
  const views = document.querySelectorAll(`.td-view[data-job="${CSS.escape(job)}"]`);
  if (document.hidden || views.length === 0) {
    return false;
  }
  const seen = await new Promise<IntersectionObserverEntry[]>(resolve => {
    const observer = new IntersectionObserver(entries => {
      observer.disconnect();
      resolve(entries);
    });
    views.forEach(view => observer.observe(view));
  });
  return seen.some(({ intersectionRatio }) => intersectionRatio >= ENOUGH);
}
