-- What each user did, over all events so far, each id once. Computed anew by every update.
CREATE MATERIALIZED VIEW customers AS
SELECT
  user,
  count_if(kind = 'order') AS orders,
  count_if(kind = 'click') AS clicks,
  coalesce(sum(amount) FILTER (WHERE kind = 'order'), 0) AS spent,
  max(time) AS last_seen
FROM (
  SELECT id, any_value(user) AS user, any_value(kind) AS kind, any_value(amount) AS amount, any_value(time) AS time
  FROM events
  GROUP BY id
)
GROUP BY user;
